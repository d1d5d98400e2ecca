"""TLS as the address asks for it: certificates that are checked, presented and refused.

The server is one with `ssl=on` where its programs can do TLS, and everywhere a way to a server that speaks TLS as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.store import open_store
from perdure.store.notes import probe
from tests.store.postgres.test_refused import refused
from tests.support.stores.postgres import Server, new_schema, programs, server_url

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]

ROLE = "postgres"


def openssl(*arguments: object) -> None:
    subprocess.run(("openssl", *map(str, arguments)), check=True, capture_output=True)


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Those of one authority, in a folder: of the server, which is called `localhost`, and of a client."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "authority.crt"

    def make(self) -> None:
        self.folder.mkdir()
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        authority_key = self.folder / "authority.key"
        made = ("-keyout", authority_key, "-out", self.authority, "-subj", f"/CN=authority {self.folder.name}")
        openssl("req", "-x509", *key, *made)
        for name, about, names in (("server", "localhost", "DNS:localhost"), ("client", ROLE, f"DNS:{ROLE}")):
            signed = ("-CA", self.authority, "-CAkey", authority_key, "-addext", f"subjectAltName={names}")
            files = ("-keyout", self.folder / f"{name}.key", "-out", self.folder / f"{name}.crt")
            openssl("req", "-x509", *key, *signed, *files, "-subj", f"/CN={about}")
        for file in self.folder.iterdir():
            file.chmod(0o600)


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    certificates = Certificates(folder=tmp_path_factory.mktemp("tls") / "right")
    certificates.make()
    return certificates


@pytest.fixture(scope="session")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    certificates = Certificates(folder=tmp_path_factory.mktemp("tls") / "wrong")
    certificates.make()
    return certificates


@contextlib.contextmanager
def server_with_tls(folder: Path, certificates: Certificates, *, asks: bool) -> Iterator[int]:
    """A server that takes TLS only; `asks`: and only clients with a certificate. Yields its port."""
    able = [version for version, place in programs().items() if has_tls(place / "postgres")]
    if not able:
        pytest.skip("no PostgreSQL here whose programs can do TLS: apt-get install postgresql")
    files = {"ssl_cert_file": "server.crt", "ssl_key_file": "server.key", "ssl_ca_file": "authority.crt"}
    server = Server(folder, able[-1], ssl="on", **{name: str(certificates.folder / f) for name, f in files.items()})
    server.make()
    (server.data / "pg_hba.conf").write_text(f"hostssl all all 127.0.0.1/32 {'cert' if asks else 'trust'}\n")
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def has_tls(program: Path) -> bool:
    return b"ssl_ca_file" in (content := program.read_bytes()) and b"libssl" in content


SSL_REQUEST = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")


@contextlib.asynccontextmanager
async def way_with_tls(certificates: Certificates, *, asks: bool) -> AsyncIterator[int]:
    """The same in front of any server: the way ends the encryption."""
    host, _, port = server_url().partition("@")[2].partition("/")[0].partition(":")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.authority))
    context.load_cert_chain(certificates.folder / "server.crt", certificates.folder / "server.key")
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if await reader.readexactly(8) == SSL_REQUEST:
                writer.write(b"S")
                await writer.start_tls(context)
                back, forth = await asyncio.open_connection(host, int(port))
                await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as way:
        yield way.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def listening(kind: str, folder: Path, certificates: Certificates, *, asks: bool = False) -> AsyncIterator[int]:
    if kind == "server":
        with server_with_tls(folder, certificates, asks=asks) as port:
            yield port
    else:
        async with way_with_tls(certificates, asks=asks) as port:
            yield port


KINDS = pytest.mark.parametrize("kind", [pytest.param("server", marks=pytest.mark.long), "way"])


@KINDS
async def test_the_servers_certificate_is_checked_as_far_as_the_address_says(
    kind: str, tmp_path: Path, right: Certificates, wrong: Certificates
) -> None:
    async with listening(kind, tmp_path, right) as port:
        schema = new_schema()

        def address(host: str, **options: object) -> str:
            more = "".join(f"&{name}={value}" for name, value in options.items())
            return f"postgresql://{ROLE}@{host}:{port}/postgres?schema={schema}{more}"

        ours, theirs = right.authority, wrong.authority
        for url in (
            address("127.0.0.1"),
            address("127.0.0.1", sslmode="require"),
            address("127.0.0.1", sslmode="verify-ca", sslrootcert=ours),
            address("localhost", sslmode="verify-full", sslrootcert=ours),
        ):
            async with open_store(url, busy_timeout=20.0) as store:
                await probe(store, 1)
        for url, sentence in (
            (address("127.0.0.1", sslmode="verify-full", sslrootcert=ours), "IP address mismatch"),
            (address("127.0.0.1", sslmode="verify-ca", sslrootcert=theirs), "certificate verify failed"),
            (address("localhost", sslmode="verify-full", sslrootcert=theirs), "certificate verify failed"),
            (address("localhost", sslmode="verify-full", sslrootcert=tmp_path / "none"), "No such file"),
            (address("127.0.0.1", sslmode="disable"), "cannot be opened: "),
        ):
            assert sentence in await refused(url)


@KINDS
async def test_a_client_shows_its_certificate(
    kind: str, tmp_path: Path, right: Certificates, wrong: Certificates
) -> None:
    async with listening(kind, tmp_path, right, asks=True) as port:
        base = f"postgresql://{ROLE}@localhost:{port}/postgres?schema={new_schema()}&sslmode=verify-full"

        def address(of: Certificates) -> str:
            own = f"sslcert={of.folder / 'client.crt'}&sslkey={of.folder / 'client.key'}"
            return f"{base}&sslrootcert={right.authority}&{own}"

        async with open_store(address(right), busy_timeout=20.0) as store:
            await probe(store, 1)
        assert "cannot be opened: " in await refused(address(wrong))
        assert "cannot be opened: " in await refused(f"{base}&sslrootcert={right.authority}")


async def test_a_server_without_tls_is_refused_where_the_address_demands_it(tmp_path: Path) -> None:
    url = f"{server_url()}?schema={new_schema()}&sslmode=require"
    assert "rejected SSL upgrade" in await refused(url)
