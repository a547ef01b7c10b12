"""Protocol of elastic training, by which members agree on the next view without a server.

:class:`Member` is a state machine without sockets and clocks. A driver passes it events and carries out its
effects, in the same way on real machines and in virtual time. See ``docs/membership.md``.
"""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.membership.elastic import PaxosMembership
    from farflung.membership.member import CertificateSigner, Driver, Member
    from farflung.membership.messages import (
        EndCertificate,
        Fact,
        MalformedMessage,
        MemberReport,
        Message,
        MessageCodec,
        Vote,
    )
    from farflung.membership.subgroup import Subgroup
    from farflung.membership.supervision import SUPERVISOR, Page, announce_end
    from farflung.membership.views import (
        EXACT_MEMBERS,
        Handover,
        View,
        find_largest_connected,
        find_reachable,
        is_majority,
    )
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "subgroup": "Subgroup",
            "elastic": "PaxosMembership",
            "member": "CertificateSigner Driver Member",
            "messages": "EndCertificate Fact MalformedMessage Message MessageCodec MemberReport Vote",
            "supervision": "SUPERVISOR Page announce_end",
            "views": "EXACT_MEMBERS Handover View is_majority find_largest_connected find_reachable",
        },
    )

__all__ = [
    "EXACT_MEMBERS",
    "SUPERVISOR",
    "CertificateSigner",
    "Driver",
    "EndCertificate",
    "Fact",
    "Handover",
    "MalformedMessage",
    "Member",
    "MemberReport",
    "Message",
    "MessageCodec",
    "Page",
    "PaxosMembership",
    "Subgroup",
    "View",
    "Vote",
    "announce_end",
    "find_largest_connected",
    "find_reachable",
    "is_majority",
]
