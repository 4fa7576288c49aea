"""Rewards: the functions that grade groups, in ordinary `rq worker` processes.

    ROLLQ_REWARD_MODULES=my_project.graders \\
        rq worker --url $ROLLQ_REDIS_URL --serializer producer.rewards.Serializer \\
        rollq-rewards-QUEUE

`rq worker` imports this package for its serializer. The modules that it may run are imported
here, once, so that the process that is forked for each group has them already.
"""

from producer.contract.rewards import Serializer
from producer.rewards.allowed import preload

__all__ = ["Serializer"]

preload()
