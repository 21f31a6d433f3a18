"""The embedded library: ask a daemon (async or blocking), or keep the index in the own process."""

from kvd.client.asynchronous import AsyncClient
from kvd.client.blocking import Client
from kvd.client.embedded import EmbeddedKvd
from kvd.client.selection import Choice, TierCredits, select
from protocols.errors import KvdError, PlanError, RequestError, Unreachable
from protocols.media import MediaRun
from protocols.plan import ExactPlan, Plan, PrefixPlan, TextPlan, exact_plan, prefix_plan
from protocols.query import Answer, StreamInfo, Trust, WorkerInfo, WorkerScore, WorkerSpec

__all__ = [
    "Answer",
    "AsyncClient",
    "Choice",
    "Client",
    "EmbeddedKvd",
    "ExactPlan",
    "KvdError",
    "MediaRun",
    "Plan",
    "PlanError",
    "PrefixPlan",
    "RequestError",
    "StreamInfo",
    "TextPlan",
    "TierCredits",
    "Trust",
    "Unreachable",
    "WorkerInfo",
    "WorkerScore",
    "WorkerSpec",
    "exact_plan",
    "prefix_plan",
    "select",
]
