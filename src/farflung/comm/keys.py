"""Certificates by which replicas authenticate each other, and their folder for runs whose store is not trusted.

A folder belongs to one machine: ``NAME.secret`` is its secret key and certificate, ``*.public`` are the
certificates of all replicas that may take part, including its own. All are PEM. A certificate is self-signed,
for P-256, and not a certificate authority. Its names and times mean nothing: it is compared byte by byte.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import secrets
import ssl
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from farflung.errors import ConfigError

__all__ = [
    "Keys",
    "build_tls_context",
    "compute_fingerprint",
    "convert_to_der",
    "is_public_key",
    "load_keys",
    "make_keys",
]

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_FILE_NBYTES = 8192
_OTHER_USERS_MODE = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a replica, and the certificates that it accepts.

    Args:
      public: Its certificate, in PEM.
      secret: Secret key and certificate, in PEM; never leaves the machine.
      accepted_names: Names of all accepted certificates; None accepts those that the run's store names.
    """

    public: str
    secret: str = field(repr=False)
    accepted_names: Mapping[str, str] | None = None

    @staticmethod
    def generate() -> Keys:
        """Generates a new pair."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        # OpenSSL finds a certificate by its subject, and takes the first match.
        named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, secrets.token_hex(16))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(named)
            .issuer_name(named)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(1970, 1, 1))  # the clocks of devices need not be right
            .not_valid_after(datetime.datetime(9999, 12, 31))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        public = certificate.public_bytes(pem)
        secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Keys(public.decode(), (secret + public).decode())


def convert_to_der(public: str) -> bytes:
    """Converts a certificate from PEM to DER."""
    return ssl.PEM_cert_to_DER_cert(public)


def compute_fingerprint(public: str) -> str:
    """Computes the short name of a certificate: the first half of its SHA-256, in hex."""
    return hashlib.sha256(convert_to_der(public)).hexdigest()[:32]


def is_public_key(text: object) -> bool:
    """Returns True if ``text`` is a certificate as in :class:`Keys`."""
    try:
        return isinstance(text, str) and _extract_certificate(text) == text
    except ValueError:
        return False


def _extract_certificate(text: str) -> str:
    """Extracts the first certificate of a text; raises ``ValueError`` if there is none."""
    begin = "-----BEGIN CERTIFICATE-----"
    public = begin + text.partition(begin)[2].partition("-----END")[0] + "-----END CERTIFICATE-----\n"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=public)
    except (TypeError, ssl.SSLError):  # not ASCII, or not a certificate
        raise ValueError("no certificate") from None
    return ssl.DER_cert_to_PEM_cert(convert_to_der(public))


def build_tls_context(keys: Keys, accepted: Iterable[str], *, is_server: bool) -> ssl.SSLContext:
    """Builds the TLS 1.3 settings between a replica and those with ``accepted`` certificates.

    Verification means only that a certificate is one of these or signed by one: compare it with the expected
    one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if is_server:
        context.num_tickets = 0
    with _write_temp_file(keys.secret) as path:
        context.load_cert_chain(path, password="none")  # rather than prompt for one
    for public in dict.fromkeys(accepted):
        context.load_verify_locations(cadata=convert_to_der(public))
    return context


@contextmanager
def _write_temp_file(text: str) -> Iterator[str]:
    """Writes a file that only this process can open; in memory on Linux."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("farflung"), "w") as memory:
            memory.write(text)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile("w") as file:  # of mode 0600
            file.write(text)
            file.flush()
            yield file.name


def load_keys(folder: Path) -> Keys:
    """Loads a folder of keys.

    Raises:
      ConfigError: it is open to others, does not hold exactly one secret key, or a file in it is damaged.
    """
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        raise ConfigError(f"--keys {folder}: cannot be read ({error.strerror})") from None
    if not is_folder:
        raise ConfigError(
            f"--keys {folder}: no such folder; make it with: farflung keys {folder} --name NAME"
        )
    _check_private(folder, folder.stat().st_mode, "700")
    secret_paths = sorted(folder.glob("*.secret"))
    if len(secret_paths) != 1:
        raise ConfigError(
            f"--keys {folder}: holds {len(secret_paths)} secret keys (*.secret) where this machine's one was due; "
            + (
                "remove those of other machines"
                if secret_paths
                else f"make one with: farflung keys {folder} --name NAME"
            )
        )
    secret = _read(secret_paths[0], is_private=True)
    try:
        keys = Keys(_extract_certificate(secret), secret)
        build_tls_context(keys, [], is_server=True)
    except (ValueError, ssl.SSLError):
        raise ConfigError(
            f"{secret_paths[0]}: damaged: it holds no key with its certificate; make a new key"
        ) from None
    names = {}
    for path in sorted(folder.glob("*.public")):
        try:
            names[_extract_certificate(_read(path))] = path.stem
        except ValueError:
            raise ConfigError(
                f"{path}: holds no public key; copy it again from the machine that made it"
            ) from None
    return replace(keys, accepted_names={**names, keys.public: secret_paths[0].stem})


def make_keys(folder: Path, name: str) -> tuple[Path, str]:
    """Creates a key and its certificate in a folder, which is created if necessary.

    Returns:
      The file to copy to the other machines, and the fingerprint of the certificate in it.

    Raises:
      ConfigError: the folder holds a secret key already, is open to others, or cannot be written.
    """
    if not _NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"--name {name!r}: use up to 64 letters, digits, dots, hyphens and underscores")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder, folder.stat().st_mode, "700")
        existing = [path for path in folder.iterdir() if path.suffix == ".secret" or path.stem == name]
        if existing:
            raise ConfigError(
                f"{existing[0]} is there already: a folder holds one machine's keys, and none is ever overwritten"
            )
        keys = Keys.generate()
        public = folder / f"{name}.public"
        _write(public, keys.public, 0o644)
        try:
            _write(folder / f"{name}.secret", keys.secret, 0o600)
        except BaseException:
            public.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep keys there ({error.strerror})") from None
    return public, compute_fingerprint(keys.public)


def _check_private(path: Path, mode: int, expected_mode: str) -> None:
    if mode & _OTHER_USERS_MODE:
        raise ConfigError(f"{path}: open to other users of this machine; first: chmod {expected_mode} {path}")


def _read(path: Path, *, is_private: bool = False) -> str:
    try:
        with path.open("rb") as file:
            if is_private:
                _check_private(path, os.fstat(file.fileno()).st_mode, "600")
            text = file.read(_MAX_FILE_NBYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: not a key file ({type(error).__name__})") from None
    if text.lstrip().startswith("{"):
        raise ConfigError(
            f"{path}: a key of before farflung used TLS; remove the .secret and .public files of this folder, make new "
            f"ones with: farflung keys {path.parent} --name {path.stem}, and copy the new .public files"
        )
    return text


def _write(path: Path, text: str, mode: int) -> None:
    """Writes a file atomically, and never over another."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.link(partial, path)  # unlike a rename, it fails if the file exists
    finally:
        partial.unlink()
