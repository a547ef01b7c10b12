"""Folders of keys, what is made known of them, and the addresses replicas listen on."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from farflung.cli.main import main
from farflung.comm import Peer
from farflung.comm.interface import (
    find_interface_address,
    find_local_address,
    format_tcp_address,
    is_loopback,
)
from farflung.comm.keys import Keys, compute_fingerprint, is_public_key, load_keys, make_keys
from farflung.comm.peer import VISITOR_RANK
from farflung.errors import ConfigError, ProtocolError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One machine's keys, with the public key of another."""
    make_keys(tmp_path / "alpha", "alpha")
    public, _ = make_keys(tmp_path / "beta", "beta")
    (tmp_path / "alpha" / public.name).write_bytes(public.read_bytes())
    return tmp_path / "alpha"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- making -----------------------------------------------------------------------------------------------------


def test_a_machines_keys_are_made_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "some" / "keys"
    assert main(["keys", str(folder), "--name", "alpha"]) == 0
    assert {path.name for path in folder.iterdir()} == {"alpha.secret", "alpha.public"}
    assert mode(folder) == 0o700
    assert mode(folder / "alpha.secret") == 0o600
    public, secret = ((folder / f"alpha.{half}").read_bytes() for half in ("public", "secret"))
    certificate = x509.load_pem_x509_certificate(public)
    key = serialization.load_pem_private_key(secret, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp256r1"
    assert certificate.public_key() == key.public_key()
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (1970, 9999)
    keys, said = load_keys(folder), capsys.readouterr().out
    assert compute_fingerprint(keys.public) in said
    hidden = keys.secret.splitlines()[1]
    assert hidden in secret.decode()
    assert hidden not in said
    assert hidden not in repr(keys)


@pytest.mark.parametrize("umask", [0, 0o077])
def test_no_umask_opens_the_secret_or_closes_the_public_key(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        make_keys(tmp_path / "keys", "alpha")
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == 0o700
    assert mode(tmp_path / "keys" / "alpha.secret") == 0o600
    assert mode(tmp_path / "keys" / "alpha.public") == 0o644


@pytest.mark.parametrize("name", ["alpha", "beta", "gamma"])
def test_nothing_is_overwritten(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["keys", str(folder), "--name", name]) == 2
    assert "is there already" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "keys"
    link = os.link

    def late(source: Path, target: Path) -> None:
        if target.suffix == ".secret":
            target.write_text("another's")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ConfigError, match="cannot keep keys there"):
        make_keys(folder, "alpha")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"alpha.secret": "another's"}


@pytest.mark.parametrize("name", ["", "..", "../alpha", "a/b", "-x", ".alpha", "a" * 65, "a b"])
def test_a_name_is_a_plain_word(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name"):
        make_keys(tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/keys: cannot keep keys there \(Not a directory\)"):
        make_keys(tmp_path / "file" / "keys", "alpha")


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_folder_lists_its_own_key_and_the_others(folder: Path) -> None:
    keys = load_keys(folder)
    assert keys.accepted_names is not None
    assert sorted(keys.accepted_names.values()) == ["alpha", "beta"]
    assert keys.accepted_names[keys.public] == "alpha"
    (folder / "alpha.public").unlink()
    assert load_keys(folder) == keys


def spoil(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "secret for the group": (
        lambda folder: (folder / "alpha.secret").chmod(0o640),
        "chmod 600 .*alpha.secret",
    ),
    "secret for all": (lambda folder: (folder / "alpha.secret").chmod(0o604), "chmod 600 .*alpha.secret"),
    "folder for the group": (lambda folder: folder.chmod(0o750), "chmod 700"),
    "no secret": (lambda folder: (folder / "alpha.secret").unlink(), r"holds 0 secret keys .* make one with"),
    "two secrets": (
        lambda folder: (folder / "beta.secret").touch(0o600),
        r"holds 2 secret keys .* remove those of other machines",
    ),
    "secret is no key": (spoil("alpha.secret", "key"), "alpha.secret: damaged"),
    "secret is empty": (spoil("alpha.secret", ""), "alpha.secret: damaged"),
    "secret of another": (
        lambda folder: (folder / "alpha.secret").write_text(
            Keys.generate().secret.partition("-----BEGIN CERT")[0] + (folder / "alpha.public").read_text()
        ),
        "alpha.secret: damaged",
    ),
    "secret without its certificate": (
        spoil("alpha.secret", Keys.generate().secret.partition("-----BEGIN CERT")[0]),
        "alpha.secret: damaged",
    ),
    "secret of before TLS": (
        spoil("alpha.secret", '{"name": "alpha", "public": "", "secret": ""}'),
        "alpha.secret: a key of before farflung used TLS; remove .* --name alpha, and copy the new .public files",
    ),
    "public of before TLS": (
        spoil("beta.public", '{"name": "beta", "public": ""}'),
        "beta.public: a key of before farflung used TLS; remove",
    ),
    "public is no key": (spoil("beta.public", "beta"), "beta.public: holds no public key"),
    "public is a folder": (lambda folder: (folder / "gamma.public").mkdir(), "gamma.public: not a key file"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_folder_is_refused(what: str, folder: Path) -> None:
    make_bad, message = BAD[what]
    load_keys(folder)
    make_bad(folder)
    with pytest.raises(ConfigError, match=message):
        load_keys(folder)


def test_an_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; make it with: farflung keys"):
        load_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    "text",
    ["", "a" * 39, "aaaa" * 100, '"' * 40, "é" * 40, "\udc00" * 40, Keys.generate().public[:-4], 7, None],
)
def test_what_is_no_public_key(text: object) -> None:
    assert not is_public_key(text)
    assert is_public_key(Keys.generate().public)


@pytest.mark.parametrize("option", ["--keys", "--interface"])
def test_what_is_for_several_machines_is_refused_on_one(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert (
        main(["train", "--workload", "synthetic/quadratic", "--out", str(tmp_path / "run"), option, "lo"])
        == 2
    )
    assert "start this under torchrun" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- peers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5000", "tcp://[fe80::1]:65535"])
@pytest.mark.parametrize("key", [None, Keys.generate().public], ids=["open", "encrypted"])
def test_a_peer_is_published_whole(address: str, key: str | None) -> None:
    peer = Peer(3, address, bytes(16), key, None if key else "node-a")
    assert Peer.from_json(peer.to_json()) == peer


@pytest.mark.parametrize(
    "fields",
    [
        {"address": "inproc://somewhere"},
        {"address": "ipc:///tmp/socket"},
        {"address": "tcp://example.org:5000"},
        {"address": "tcp://10.0.0.1:0;10.0.0.2:5000"},
        {"address": "tcp://10.0.0.1"},
        {"address": "tcp://10.0.0.256:5000"},
        {"address": "10.0.0.1"},
        {"token": ""},
        {"token": "00" * 256},
        {"key": ""},
        {"key": "short"},
        {"key": 7},
        {"rank": "first"},
        {"rank": -1},
        {"rank": float("inf")},
        {"rank": VISITOR_RANK},
    ],
)
def test_nonsense_is_no_peer(fields: dict[str, object]) -> None:
    good = json.loads(Peer(3, "tcp://10.0.0.1:5000", bytes(16), Keys.generate().public).to_json())
    with pytest.raises(ProtocolError, match="where an address was due"):
        Peer.from_json(json.dumps({**good, **fields}))


# --- addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_a_master_on_this_machine_is_reached_by_loopback(host: str) -> None:
    assert find_local_address(host) == "127.0.0.1"


def test_an_interface_is_named_or_an_address() -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert find_interface_address(loopback) == "127.0.0.1"
    assert find_interface_address("192.0.2.1") == "192.0.2.1"
    assert find_interface_address("2001:DB8::1") == "2001:db8::1"
    with pytest.raises(ConfigError, match=f"--interface nowhere0: .*those are: .*{loopback}"):
        find_interface_address("nowhere0")


def test_an_unknown_master_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        ConfigError, match=r"MASTER_ADDR far\.example: unknown host \(Name or service not known\)"
    ):
        find_local_address("far.example")


def test_what_is_loopback() -> None:
    assert is_loopback("127.9.9.9")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert format_tcp_address("::1") == "tcp://[::1]"
    assert format_tcp_address("10.0.0.1") == "tcp://10.0.0.1"
