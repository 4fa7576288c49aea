"""Rewards: the functions that grade groups, in ordinary `rq worker` processes.

    ROLLQ_REWARD_MODULES=my_project.graders ROLLQ_QUEUE=grpo \\
        rq worker -c producer.rewards.settings --serializer producer.rewards.Serializer

`rq worker` imports this package for its serializer. The modules that it may run are imported
here, once, so that the process that is forked for each group has them already.
"""

from producer.contract.rewards import Serializer
from producer.rewards.allowed import preload

__all__ = ["Serializer"]

preload()
