"""What an error of redis-py means: whether it will pass by itself, and how to tell of it.

Used by `connection.py` alone.
"""

from __future__ import annotations

import re
import ssl

import redis

from producer.contract.errors import InvalidSample, RollqError

#: What a server says that will pass; Redis 6.2 says it behind the place in the script.
_PASSING_WORDS = re.compile(
    r"(?:^|: -?)(?:OOM|READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|MISCONF|NOREPLICAS"
    r"|UNBLOCKED|BUSY) "
)
_PASSING_ERRORS = (  # redis-py takes the word off those that it knows
    redis.ReadOnlyError,
    redis.OutOfMemoryError,
    redis.exceptions.ClusterDownError,  # also MASTERDOWN
    redis.exceptions.TryAgainError,
)
_NO_MASTER = "No master found"


def passing(error: redis.RedisError, *, known: bool) -> bool:
    """Will the same call succeed later, without anybody changing it?

    `known`: it succeeded before, so a refused password or certificate is one that is being
    rotated, and what is no Redis is something on the way to it.
    """
    if isinstance(error, redis.AuthenticationError | redis.InvalidResponse) or tls_error(error):
        return known
    if _refused_by_sentinels(error):
        return known
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return True
    return isinstance(error, _PASSING_ERRORS) or bool(_PASSING_WORDS.search(str(error)))


def tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """What TLS refused, under the error of redis-py; a connection that was cut is no refusal."""
    cut = ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError
    while error is not None:
        if isinstance(error, ssl.SSLError) and not isinstance(error, cut):
            return error
        error = error.__cause__ or error.__context__
    return None


def advice(error: redis.RedisError) -> str:
    """What to do about an error that will not pass."""
    if tls_error(error):
        return (
            "; ssl_ca_certs in the URL must name the CA of the server's certificate, the host be "
            "one of the certificate's, and ssl_certfile be given where the server asks for one"
        )
    if isinstance(error, redis.InvalidResponse):
        return "; is this the port of a Redis? One that speaks TLS needs rediss://"
    if _refused_by_sentinels(error):
        return "; check user and password for the sentinels, which have their own"
    if isinstance(error, redis.AuthenticationError):
        return "; check user and password of the URL or of the password file"
    return ""


def refusal(error: redis.ResponseError) -> RollqError | None:
    """The words of a script that refused its arguments."""
    found = re.search(r"ROLLQ (.*?)(?:,? script: |$)", str(error))
    return InvalidSample(found[1]) if found else None


def missing_queue(error: redis.RedisError) -> bool:
    # Somebody flushed the database: the scripts say the one, a read of results the other.
    return "NOQUEUE" in str(error) or "NOGROUP " in str(error)


def words(error: redis.RedisError) -> str:
    """Its message, to go on behind; of sentinels, without the settings that redis-py quotes."""
    message = str(error).removesuffix(".")
    if not message.startswith(_NO_MASTER):
        return message
    head, _, rest = message.partition(" : ")
    reasons = re.findall(r"> - (.*?)(?=, <redis|$)", rest)
    return head + (f"; the sentinels: {', '.join(reasons)}" if reasons else "")


def _refused_by_sentinels(error: redis.RedisError) -> bool:
    return str(error).startswith(_NO_MASTER) and "AuthenticationError" in words(error)
