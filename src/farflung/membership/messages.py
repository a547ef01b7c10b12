"""Messages of the agreement on views, and their encoding as JSON.

Each field is checked before it is used, and a message of another form raises :class:`MalformedMessage`. Certificates
are signed with a key of the run, and one with a wrong signature is malformed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias, get_type_hints

from farflung.membership.views import View

__all__ = ["Certificate", "Fact", "Malformed", "Message", "MessageCodec", "Report", "Vote"]

_MAX_NBYTES, _MAX_LIST, _MAX_NAME = 1 << 22, 1 << 16, 64


class Malformed(ValueError):
    """Error of a message that lacks the form of its kind, or of a certificate with a wrong signature."""


class Fact(NamedTuple):
    """Subject of a count in a member's knowledge: changes of a link, or wishes of a member.

    The count of a link between members begins at 0 and is odd while it is cut. A guest's is 2 when it is first seen.

    Args:
      kind: ``"link"``, ``"leave"``, or ``"redo"``: a wish for a new view of the same members.
      member: Member that observes or wishes it; only this member raises the count.
      peer: Other end of the link; empty for wishes.
    """

    kind: str
    member: str
    other: str = ""


class Vote(NamedTuple):
    """Vote that accepts a value at a ballot: the view after the current one.

    Args:
      ballot: Size of the knowledge of the voter.
      dead_members: Members that were certified dead at that time.
      value: View voted for.
    """

    ballot: int
    dead: tuple[str, ...]
    value: View


class Report(NamedTuple):
    """Knowledge of a member in its view; it promises to vote at no smaller ballot.

    Args:
      view: View of the member.
      fact_counts: Count of each fact.
      wills: Certificates of dead members of the view, by name.
      held_exchanges: Whole exchanges, once exchanges are stopped; see :meth:`Driver.freeze`. ``None`` before.
      vote: Latest vote of the member in this view.
    """

    view: View
    know: Mapping[Fact, int]
    wills: Mapping[str, Certificate]
    held: tuple[int, ...] | None
    vote: Vote | None

    @property
    def ballot(self) -> int:
        """Size of the knowledge: the sum of its counts, and the number of certificates."""
        return sum(self.know.values()) + len(self.wills)


class Certificate(NamedTuple):
    """Certificate that a process has ended or no longer takes part, with the last report that it may have sent.

    Args:
      name: Name of the process.
      exit_code: 0 from a member that stops on its own; otherwise from its supervisor, after ``waitpid``.
      will: Last report; ``None`` if it never sent one.
      signature: HMAC-SHA256 of name, exit code and will, hexadecimal; see :meth:`MessageCodec.sign_certificate`.
    """

    name: str
    exit_code: int
    will: Report | None
    signature: str


Message: TypeAlias = Report | Vote | Certificate
"""Message between members; supervisors send certificates only."""


class _Count(NamedTuple):
    kind: str
    member: str
    other: str
    number: int


class _Report(NamedTuple):
    """Report as it is sent, with the names of its certificates; each certificate is sent once beside it."""

    view: View
    know: tuple[_Count, ...]
    wills: tuple[str, ...]
    held: tuple[int, ...] | None
    vote: Vote | None


class _Certificate(NamedTuple):
    name: str
    exit_code: int
    will: _Report | None
    signature: str


class _Envelope(NamedTuple):
    """Message as it is sent; without report and vote it is the last of the certificates."""

    report: _Report | None
    vote: Vote | None
    certificates: tuple[_Certificate, ...]


class MessageCodec:
    """Codec of messages and signer of certificates.

    Args:
      key: Secret of this run only.
    """

    def __init__(self, key: bytes) -> None:
        if not key:
            raise ValueError("the key of a run must not be empty")
        self._key = key

    def certify(self, name: str, exit_code: int, will: Report | None) -> Certificate:
        """Signs a certificate; a supervisor must wait until ``waitpid`` has returned for the process."""
        signed = [name, exit_code, None if will is None else _flat(will)]
        digest = hmac.new(self._key, _text(signed), hashlib.sha256).hexdigest()
        return Certificate(name, exit_code, will, digest)

    def encode(self, message: Message) -> bytes:
        """Encodes a message as JSON; certificates follow those that their wills name."""
        certificates: dict[str, _Certificate] = {}
        if isinstance(message, Vote):
            envelope = _Envelope(None, message, ())
        elif isinstance(message, Report):
            _collect(message.wills, certificates)
            envelope = _Envelope(_flat(message), None, tuple(certificates.values()))
        else:
            _collect({message.name: message}, certificates)
            envelope = _Envelope(None, None, tuple(certificates.values()))
        return _text(envelope)

    def decode(self, data: bytes) -> Message:
        """Decodes a message.

        Raises:
          MalformedMessage: The bytes encode no message, or a certificate's signature is wrong.
        """
        if len(data) > _MAX_NBYTES:
            raise Malformed(f"a message of {len(data):,} bytes; at most {_MAX_NBYTES:,} are allowed")
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError):
            raise Malformed("not JSON") from None
        envelope: _Envelope = _checked(plain, _Envelope)
        certificates: dict[str, Certificate] = {}
        for name, exit_code, flat, signature in envelope.certificates:
            will = None if flat is None else _report(flat, certificates)
            certificate = self.certify(name, exit_code, will)
            if not name or name in certificates or not hmac.compare_digest(certificate.signature, signature):
                raise Malformed(
                    f"certificate of {name or 'no process'}: given twice, or its signature is wrong"
                )
            certificates[name] = certificate
        if envelope.report is not None and envelope.vote is None:
            return _report(envelope.report, certificates)
        if envelope.vote is not None and envelope.report is None and not certificates:
            _check_vote(envelope.vote)
            return envelope.vote
        if envelope.vote is None and certificates:
            return certificates[envelope.certificates[-1].name]
        raise Malformed("neither a report, nor a vote, nor a certificate")


def _text(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _flat(report: Report) -> _Report:
    know = tuple(_Count(*fact, count) for fact, count in sorted(report.know.items()))
    return _Report(report.view, know, tuple(sorted(report.wills)), report.held, report.vote)


def _collect(wills: Mapping[str, Certificate], into: dict[str, _Certificate]) -> None:
    """Collects certificates in sending order: after those that their wills name."""
    for name, exit_code, will, signature in wills.values():
        if name not in into:
            if will is not None:
                _collect(will.wills, into)
            into[name] = _Certificate(name, exit_code, None if will is None else _flat(will), signature)


# --- checks ---------------------------------------------------------------------------------------------------------


def _report(flat: _Report, certificates: Mapping[str, Certificate]) -> Report:
    view, counts, wills, held, vote = flat
    _check_view(view)
    know: dict[Fact, int] = {}
    for kind, member, peer, count in counts:
        if kind not in ("link", "leave", "redo") or (kind == "link") != bool(peer) or not member or count < 1:
            raise Malformed("knowledge: not a fact with its count")
        know[Fact(kind, member, peer)] = count
    if len(know) < len(counts) or not _ascending(wills):
        raise Malformed("knowledge: a fact or a certificate is given twice")
    if not certificates.keys() >= set(wills) or not set(wills) <= set(view.members):
        raise Malformed("knowledge: the certificate of a member is missing")
    if held is not None and not _ascending(held):
        raise Malformed("held: exchanges are not in ascending order")
    if vote is not None:
        _check_vote(vote)
        if vote.value.number != view.number + 1:
            raise Malformed("vote: not for the view after the report's")
    return Report(view, know, {name: certificates[name] for name in wills}, held, vote)


def _check_vote(vote: Vote) -> None:
    _check_view(vote.value)
    if not _ascending(vote.dead) or vote.value.number < 2:
        raise Malformed("vote: a dead member is named twice, or the view has no predecessor")


def _check_view(view: View) -> None:
    if view.number < 1 or len(set(view.members)) < len(view.members) or not all(view.members):
        raise Malformed("view: number or members are wrong")
    if not _ascending(view.newest) or len(view.holders) != len(view.newest) or not all(view.holders):
        raise Malformed("view: exchanges or their holders are wrong")


def _ascending(values: Collection[Any]) -> bool:
    return list(values) == sorted(set(values))


def _checked(value: Any, due: Any) -> Any:
    """Returns parsed JSON as the expected type, which consists of named tuples, tuples, int, str and None."""
    if isinstance(due, types.UnionType):
        return None if value is None else _checked(value, typing.get_args(due)[0])
    if due is int:
        if type(value) is not int or not -(1 << 8) <= value < 1 << 48:
            raise Malformed("not an integer, or out of range")
        return value
    if due is str:
        if type(value) is not str or len(value) > _MAX_NAME or not (value.isascii() and value.isprintable()):
            raise Malformed(f"not a string of at most {_MAX_NAME} printable ASCII characters")
        return value
    if not isinstance(value, list) or len(value) > _MAX_LIST:
        raise Malformed("not a list, or too long")
    if typing.get_origin(due) is tuple:
        return tuple(_checked(item, typing.get_args(due)[0]) for item in value)
    fields = _FIELDS[due]
    if len(value) != len(fields):
        raise Malformed(f"a {due.__name__.strip('_').lower()} has {len(fields)} fields, not {len(value)}")
    return due(*(_checked(item, field) for item, field in zip(value, fields, strict=True)))


_FIELDS = {
    kind: tuple(get_type_hints(kind).values())
    for kind in (View, Vote, _Count, _Report, _Certificate, _Envelope)
}
