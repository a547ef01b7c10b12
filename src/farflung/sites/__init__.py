"""Sites: a replica that several processes hold together, sharded or as copies."""

from farflung.sites.buckets import SiteBuckets
from farflung.sites.site import ReplicaSite

__all__ = ["ReplicaSite", "SiteBuckets"]
