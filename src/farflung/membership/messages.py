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

__all__ = ["EndCertificate", "Fact", "MalformedMessage", "MemberReport", "Message", "MessageCodec", "Vote"]

_MAX_NBYTES, _MAX_LIST, _MAX_NAME = 1 << 22, 1 << 16, 64


class MalformedMessage(ValueError):
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
    peer: str = ""


class Vote(NamedTuple):
    """Vote that accepts a value at a ballot: the view after the current one.

    Args:
      ballot: Size of the knowledge of the voter.
      dead_members: Members that were certified dead at that time.
      value: View voted for.
    """

    ballot: int
    dead_members: tuple[str, ...]
    value: View


class MemberReport(NamedTuple):
    """Knowledge of a member in its view; it promises to vote at no smaller ballot.

    Args:
      view: View of the member.
      fact_counts: Count of each fact.
      certificates: Certificates of dead members of the view, by name.
      held_exchanges: Whole exchanges, once exchanges are stopped; see :meth:`Driver.freeze`. ``None`` before.
      vote: Latest vote of the member in this view.
    """

    view: View
    fact_counts: Mapping[Fact, int]
    certificates: Mapping[str, EndCertificate]
    held_exchanges: tuple[int, ...] | None
    vote: Vote | None

    @property
    def ballot(self) -> int:
        """Size of the knowledge: the sum of its counts, and the number of certificates."""
        return sum(self.fact_counts.values()) + len(self.certificates)


class EndCertificate(NamedTuple):
    """Certificate that a process has ended or no longer takes part, with the last report that it may have sent.

    Args:
      name: Name of the process.
      exit_code: 0 from a member that stops on its own; otherwise from its supervisor, after ``waitpid``.
      final_report: Last report; ``None`` if it never sent one.
      signature: HMAC-SHA256 of name, exit code and final report, hexadecimal; see
        :meth:`MessageCodec.sign_certificate`.
    """

    name: str
    exit_code: int
    final_report: MemberReport | None
    signature: str


Message: TypeAlias = MemberReport | Vote | EndCertificate
"""Message between members; supervisors send certificates only."""


class _Count(NamedTuple):
    kind: str
    member: str
    peer: str
    number: int


class _FlatReport(NamedTuple):
    """Report as it is sent, with the names of its certificates; each certificate is sent once beside it."""

    view: View
    fact_counts: tuple[_Count, ...]
    certificate_names: tuple[str, ...]
    held_exchanges: tuple[int, ...] | None
    vote: Vote | None


class _FlatCertificate(NamedTuple):
    name: str
    exit_code: int
    final_report: _FlatReport | None
    signature: str


class _Envelope(NamedTuple):
    """Message as it is sent; without report and vote it is the last of the certificates."""

    report: _FlatReport | None
    vote: Vote | None
    certificates: tuple[_FlatCertificate, ...]


class MessageCodec:
    """Codec of messages and signer of certificates.

    Args:
      key: Secret of this run only.
    """

    def __init__(self, key: bytes) -> None:
        if not key:
            raise ValueError("the key of a run must not be empty")
        self._key = key

    def sign_certificate(
        self, name: str, exit_code: int, final_report: MemberReport | None
    ) -> EndCertificate:
        """Signs a certificate; a supervisor must wait until ``waitpid`` has returned for the process."""
        signed = [name, exit_code, None if final_report is None else _flatten_report(final_report)]
        digest = hmac.new(self._key, _encode_json(signed), hashlib.sha256).hexdigest()
        return EndCertificate(name, exit_code, final_report, digest)

    def encode(self, message: Message) -> bytes:
        """Encodes a message as JSON; certificates follow those that their final reports name."""
        certificates: dict[str, _FlatCertificate] = {}
        if isinstance(message, Vote):
            envelope = _Envelope(None, message, ())
        elif isinstance(message, MemberReport):
            _collect_certificates(message.certificates, certificates)
            envelope = _Envelope(_flatten_report(message), None, tuple(certificates.values()))
        else:
            _collect_certificates({message.name: message}, certificates)
            envelope = _Envelope(None, None, tuple(certificates.values()))
        return _encode_json(envelope)

    def decode(self, data: bytes) -> Message:
        """Decodes a message.

        Raises:
          MalformedMessage: The bytes encode no message, or a certificate's signature is wrong.
        """
        if len(data) > _MAX_NBYTES:
            raise MalformedMessage(f"a message of {len(data):,} bytes; at most {_MAX_NBYTES:,} are allowed")
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError):
            raise MalformedMessage("not JSON") from None
        envelope: _Envelope = _parse_value(plain, _Envelope)
        certificates: dict[str, EndCertificate] = {}
        for name, exit_code, flat, signature in envelope.certificates:
            final_report = None if flat is None else _unflatten_report(flat, certificates)
            certificate = self.sign_certificate(name, exit_code, final_report)
            if not name or name in certificates or not hmac.compare_digest(certificate.signature, signature):
                raise MalformedMessage(
                    f"certificate of {name or 'no process'}: given twice, or its signature is wrong"
                )
            certificates[name] = certificate
        if envelope.report is not None and envelope.vote is None:
            return _unflatten_report(envelope.report, certificates)
        if envelope.vote is not None and envelope.report is None and not certificates:
            _check_vote(envelope.vote)
            return envelope.vote
        if envelope.vote is None and certificates:
            return certificates[envelope.certificates[-1].name]
        raise MalformedMessage("neither a report, nor a vote, nor a certificate")


def _encode_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _flatten_report(report: MemberReport) -> _FlatReport:
    know = tuple(_Count(*fact, count) for fact, count in sorted(report.fact_counts.items()))
    return _FlatReport(
        report.view, know, tuple(sorted(report.certificates)), report.held_exchanges, report.vote
    )


def _collect_certificates(
    certificates: Mapping[str, EndCertificate], collected: dict[str, _FlatCertificate]
) -> None:
    """Collects certificates in sending order: after those that their final reports name."""
    for name, exit_code, final_report, signature in certificates.values():
        if name not in collected:
            if final_report is not None:
                _collect_certificates(final_report.certificates, collected)
            collected[name] = _FlatCertificate(
                name, exit_code, None if final_report is None else _flatten_report(final_report), signature
            )


# --- checks ---------------------------------------------------------------------------------------------------------


def _unflatten_report(flat: _FlatReport, certificates: Mapping[str, EndCertificate]) -> MemberReport:
    view, counts, certificate_names, held, vote = flat
    _check_view(view)
    know: dict[Fact, int] = {}
    for kind, member, peer, count in counts:
        if kind not in ("link", "leave", "redo") or (kind == "link") != bool(peer) or not member or count < 1:
            raise MalformedMessage("knowledge: not a fact with its count")
        know[Fact(kind, member, peer)] = count
    if len(know) < len(counts) or not _is_ascending(certificate_names):
        raise MalformedMessage("knowledge: a fact or a certificate is given twice")
    if not certificates.keys() >= set(certificate_names) or not set(certificate_names) <= set(view.members):
        raise MalformedMessage("knowledge: the certificate of a member is missing")
    if held is not None and not _is_ascending(held):
        raise MalformedMessage("held: exchanges are not in ascending order")
    if vote is not None:
        _check_vote(vote)
        if vote.value.number != view.number + 1:
            raise MalformedMessage("vote: not for the view after the report's")
    return MemberReport(view, know, {name: certificates[name] for name in certificate_names}, held, vote)


def _check_vote(vote: Vote) -> None:
    _check_view(vote.value)
    if not _is_ascending(vote.dead_members) or vote.value.number < 2:
        raise MalformedMessage("vote: a dead member is named twice, or the view has no predecessor")


def _check_view(view: View) -> None:
    if view.number < 1 or len(set(view.members)) < len(view.members) or not all(view.members):
        raise MalformedMessage("view: number or members are wrong")
    if (
        not _is_ascending(view.complete_exchanges)
        or len(view.holders) != len(view.complete_exchanges)
        or not all(view.holders)
    ):
        raise MalformedMessage("view: exchanges or their holders are wrong")


def _is_ascending(values: Collection[Any]) -> bool:
    return list(values) == sorted(set(values))


def _parse_value(value: Any, expected: Any) -> Any:
    """Returns parsed JSON as the expected type, which consists of named tuples, tuples, int, str and None."""
    if isinstance(expected, types.UnionType):
        return None if value is None else _parse_value(value, typing.get_args(expected)[0])
    if expected is int:
        if type(value) is not int or not -(1 << 8) <= value < 1 << 48:
            raise MalformedMessage("not an integer, or out of range")
        return value
    if expected is str:
        if type(value) is not str or len(value) > _MAX_NAME or not (value.isascii() and value.isprintable()):
            raise MalformedMessage(f"not a string of at most {_MAX_NAME} printable ASCII characters")
        return value
    if not isinstance(value, list) or len(value) > _MAX_LIST:
        raise MalformedMessage("not a list, or too long")
    if typing.get_origin(expected) is tuple:
        return tuple(_parse_value(item, typing.get_args(expected)[0]) for item in value)
    fields = _FIELDS[expected]
    if len(value) != len(fields):
        raise MalformedMessage(
            f"a {expected.__name__.strip('_').lower()} has {len(fields)} fields, not {len(value)}"
        )
    return expected(*(_parse_value(item, field) for item, field in zip(value, fields, strict=True)))


_FIELDS = {
    kind: tuple(get_type_hints(kind).values())
    for kind in (View, Vote, _Count, _FlatReport, _FlatCertificate, _Envelope)
}
