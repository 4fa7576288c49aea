"""TLS, with certificates made here: it works for trainer and worker, and says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import trustme

from producer.contract.connection import AsyncQueue, Queue
from producer.contract.errors import QueueUnusable, RedisUnavailable
from producer.server import Prefer, start_embedded
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine
from tests.servers import free_port

Serve = Callable[..., AbstractContextManager[int]]


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> Path:
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@pytest.fixture
def serve(server_kind: Prefer, ca: trustme.CA, ca_file: Path, tmp_path: Path) -> Serve:
    """Starts a server that speaks TLS alone; yields its port."""

    @contextmanager
    def start(name: str = "127.0.0.1", clients: str = "no") -> Iterator[int]:
        certificate = ca.issue_cert(name)
        certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
        port = free_port()
        config = {
            "bind": "127.0.0.1",
            "tls-port": str(port),
            "tls-cert-file": str(tmp_path / "server.pem"),
            "tls-key-file": str(tmp_path / "server.pem"),
            "tls-ca-cert-file": str(ca_file),
            "tls-auth-clients": clients,
        }
        try:
            server = start_embedded(tmp_path / "redis", prefer=server_kind, config=config)
        except RedisUnavailable as error:
            if "Bad directive" in str(error) or "finding TLS support" in str(error):
                pytest.skip("this server was built without TLS")
            raise
        with server:
            yield port

    return start


async def refused(url: str) -> str:
    """What both twins say of a Redis that they refuse, and do not wait for."""
    queue, twin = Queue(url, "q", patience=5.0), AsyncQueue(url, "q", patience=5.0)
    with pytest.raises(QueueUnusable) as said:
        await asyncio.to_thread(queue.open)
    with pytest.raises(QueueUnusable) as said_by_twin:
        await twin.open()
    queue.close()
    await twin.close()
    words, twins = str(said.value), str(said_by_twin.value)
    assert url.partition("?")[0] in words
    assert words.partition(";")[2] == twins.partition(";")[2] != ""
    return words


async def test_a_pool_works_over_tls(serve: Serve, ca_file: Path, tmp_path: Path) -> None:
    with serve() as port:
        (tmp_path / "pool").mkdir()
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca_file}"
        pool = Pool(url, tmp_path / "pool", {})
        worker = await pool.start(StepEngine(), name="a")
        version = await pool.update(worker)
        pool.submit(3)
        groups = await pool.groups(3)

        assert {v for g in groups for r in g.rollouts for v in r.versions} == {version}
        await pool.close()


async def test_a_server_of_another_ca_is_refused(serve: Serve, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with serve() as port:
        for query in ("", f"?ssl_ca_certs={tmp_path}/other.pem"):
            words = await refused(f"rediss://127.0.0.1:{port}{query}")

            assert "certificate verify failed" in words
            assert "ssl_ca_certs" in words


async def test_a_certificate_of_another_host_is_refused(serve: Serve, ca_file: Path) -> None:
    with serve("elsewhere.example") as port:
        words = await refused(f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca_file}")

    assert "not valid for '127.0.0.1'" in words


def test_who_forgets_that_a_port_speaks_tls_is_told(serve: Serve) -> None:
    """The server only hangs up, as a network may: that could pass, and is waited for."""
    with serve() as port:
        queue = Queue(f"redis://127.0.0.1:{port}", "q", patience=0.0)
        with pytest.raises(RedisUnavailable, match="rediss:// where the port speaks TLS"):
            queue.open()
        queue.close()


async def test_a_client_certificate_is_shown_where_it_is_asked_for(
    serve: Serve, ca: trustme.CA, ca_file: Path, tmp_path: Path
) -> None:
    both = tmp_path / "client.pem"
    ca.issue_cert("trainer.example").private_key_and_cert_chain_pem.write_to_path(both)
    with serve(clients="yes") as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca_file}"
        queue = Queue(f"{url}&ssl_certfile={both}&ssl_keyfile={both}", "q", patience=0.0)
        queue.open()
        assert queue.call("reap", limit=1) == [0, 0]
        queue.close()

        # The refusal comes behind the handshake: whether it can be read before the connection is
        # cut is a race, and one that was cut could pass, and is waited for.
        queue, twin = Queue(url, "q", patience=0.0), AsyncQueue(url, "q", patience=0.0)
        for attempt in (asyncio.to_thread(queue.open), twin.open()):
            with pytest.raises((QueueUnusable, RedisUnavailable), match="ssl_certfile"):
                await attempt
        queue.close()
        await twin.close()


def test_what_cannot_be_read_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.pem"
    with pytest.raises(QueueUnusable, match=rf"ssl_ca_certs={missing} cannot be read"):
        Queue(f"rediss://localhost?ssl_ca_certs={missing}", "q")
