"""Settings for `rq worker -c producer.rewards.settings`: where its Redis is, and which queue.

Made of ROLLQ_REWARDS_URL or else ROLLQ_REDIS_URL, with the password of
ROLLQ_REDIS_PASSWORD_FILE, so that none is on a command line; and of ROLLQ_QUEUE. A worker without
our serializer, which these settings cannot name, is refused: it would unpickle what it reads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from producer.contract.errors import QueueUnusable
from producer.contract.keys import QueueKeys, rewards_queue
from producer.contract.url import PASSWORD_FILE
from producer.rewards.allowed import serves

_SERIALIZER = "producer.rewards.Serializer"


def _url() -> str:
    url = (
        os.environ.get("ROLLQ_REWARDS_URL")
        or os.environ.get("ROLLQ_REDIS_URL")
        or "redis://localhost:6379"
    )
    path = os.environ.get(PASSWORD_FILE)
    if not path:
        return url
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    try:
        password = quote(Path(path).read_text().strip(), safe="")
    except OSError as error:
        raise QueueUnusable(f"{PASSWORD_FILE}={path} cannot be read: {error.strerror}") from error
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{host}"))


def _check_serializer() -> None:
    if serves() and not any(a.endswith(_SERIALIZER) for a in sys.argv):
        raise SystemExit(
            f"rq {sys.argv[1]} would unpickle what it reads: add --serializer {_SERIALIZER}"
        )


_check_serializer()
REDIS_URL = _url()
QUEUES = [rewards_queue(QueueKeys(os.environ.get("ROLLQ_QUEUE") or "default").queue)]
