"""The keys replicas prove themselves with, and the folder that holds them where the run's store is not trusted.

A folder belongs to one machine: its secret key as ``NAME.secret``, and the public keys of all replicas that may take
part as ``*.public``, its own among them. Both are JSON; keys are written as ZeroMQ writes them (Z85, 40 characters).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from farflung.errors import ConfigError

__all__ = ["Keys", "is_public_key", "load_keys", "make_keys"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_NBYTES = 32
_MAX_FILE_NBYTES = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Keys:
    """What a replica proves itself with, and whom it accepts.

    Args:
      public: the half that others know it by.
      secret: the half that never leaves the machine.
      listed: the names of all accepted public keys; ``None`` accepts those that the run's store names.
    """

    public: str
    secret: str = field(repr=False)
    listed: Mapping[str, str] | None = None

    @staticmethod
    def fresh() -> Keys:
        """A new pair for one run, made known through its store."""
        public, secret = zmq.curve_keypair()
        return Keys(public.decode(), secret.decode())


def is_public_key(text: str) -> bool:
    """Whether ``text`` is a public key in Z85."""
    try:
        return len(z85.decode(text.encode())) == _KEY_NBYTES
    except Exception:  # z85 raises whatever its arithmetic does
        return False


def load_keys(folder: Path) -> Keys:
    """Reads a folder of keys.

    Raises:
      ConfigError: it is open to others, holds not exactly one secret key, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"--keys {folder}: no such folder; make it with: farflung keys {folder} --name NAME"
        )
    _demand_private(folder, folder.stat().st_mode, "700")
    own = sorted(folder.glob("*.secret"))
    if len(own) != 1:
        raise ConfigError(
            f"--keys {folder}: holds {len(own)} secret keys (*.secret) where this machine's one was due; "
            + (
                "remove those of other machines"
                if own
                else f"make one with: farflung keys {folder} --name NAME"
            )
        )
    pair = _read(own[0], private=True)
    public, secret = pair.get("public"), pair.get("secret")
    if not isinstance(secret, str) or not isinstance(public, str) or _public_of(secret) != public:
        raise ConfigError(f"{own[0]}: damaged: its two halves do not belong together; make a new key")
    listed = {}
    for path in sorted(folder.glob("*.public")):
        key = _read(path).get("public")
        if not isinstance(key, str) or not is_public_key(key):
            raise ConfigError(f"{path}: holds no public key; copy it again from the machine that made it")
        listed[key] = path.stem
    return Keys(public, secret, {**listed, public: own[0].stem})


def make_keys(folder: Path, name: str) -> tuple[Path, str]:
    """Makes a key pair in a folder, which is made too where there is none.

    Returns:
      The file to copy to the other machines, and the public key in it.

    Raises:
      ConfigError: the folder holds a secret key already, is open to others, or cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: use up to 64 letters, digits, dots, hyphens and underscores")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _demand_private(folder, folder.stat().st_mode, "700")
        there = [path for path in folder.iterdir() if path.suffix == ".secret" or path.stem == name]
        if there:
            raise ConfigError(
                f"{there[0]} is there already: a folder holds one machine's keys, and none is ever overwritten"
            )
        keys = Keys.fresh()
        public = folder / f"{name}.public"
        _write(public, {"name": name, "public": keys.public}, 0o644)
        try:
            _write(
                folder / f"{name}.secret", {"name": name, "public": keys.public, "secret": keys.secret}, 0o600
            )
        except BaseException:
            public.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep keys there ({error.strerror})") from None
    return public, keys.public


def _demand_private(path: Path, mode: int, wanted: str) -> None:
    if mode & _OTHERS:
        raise ConfigError(f"{path}: open to other users of this machine; first: chmod {wanted} {path}")


def _public_of(secret: str) -> str | None:
    try:
        return zmq.curve_public(secret.encode()).decode()
    except Exception:  # as in is_public_key
        return None


def _read(path: Path, *, private: bool = False) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if private:
                _demand_private(path, os.fstat(file.fileno()).st_mode, "600")
            entry = json.loads(file.read(_MAX_FILE_NBYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a key file ({type(error).__name__})") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: not a key file")
    return entry


def _write(path: Path, entry: Mapping[str, str], mode: int) -> None:
    """Writes a file that appears whole or not at all, and never in place of another."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(entry, file, indent=2)
            file.write("\n")
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.link(partial, path)  # unlike a rename, it fails where there is one already
    finally:
        partial.unlink()
