"""Protocol of elastic training, by which members agree on the next view without a server.

:class:`Member` is a state machine without sockets and clocks. A driver passes it events and carries out its effects,
in the same way on real machines and in virtual time. See ``docs/membership.md``.
"""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.membership.among import Among
    from farflung.membership.elastic import Elastic
    from farflung.membership.member import Certify, Driver, Member
    from farflung.membership.messages import Certificate, Fact, Malformed, Message, MessageCodec, Report, Vote
    from farflung.membership.supervision import SUPERVISOR, Page, certify
    from farflung.membership.views import (
        EXACT_MEMBERS,
        Transfer,
        View,
        is_majority,
        largest_connected,
        reachable,
    )
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "among": "Among",
            "elastic": "Elastic",
            "member": "Certify Driver Member",
            "messages": "Certificate Fact Malformed Message MessageCodec Report Vote",
            "supervision": "SUPERVISOR Page certify",
            "views": "EXACT_MEMBERS Transfer View is_majority largest_connected reachable",
        },
    )

__all__ = [
    "EXACT_MEMBERS",
    "SUPERVISOR",
    "Among",
    "Certificate",
    "Certify",
    "Driver",
    "Elastic",
    "Fact",
    "Malformed",
    "Member",
    "Message",
    "MessageCodec",
    "Page",
    "Report",
    "Transfer",
    "View",
    "Vote",
    "certify",
    "is_majority",
    "largest_connected",
    "reachable",
]
