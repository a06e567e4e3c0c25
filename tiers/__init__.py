"""Control: what is cached where, and what runs next. No torch, no device, no address."""

from kvstrata.tiers.cache import CacheControl
from kvstrata.tiers.keys import KeyChain, page_keys, partial_key, root_key
from kvstrata.tiers.namespace import ComponentIdentity, Namespace, component_fingerprint
from kvstrata.tiers.node import L3State, Match, Node
from kvstrata.tiers.pending import Deadlines
from kvstrata.tiers.planning import SchedulerSettings
from kvstrata.tiers.policies import (
    EvictionPolicy,
    PrefetchPolicy,
    RestorePolicy,
    WritePolicy,
    policy_class,
)
from kvstrata.tiers.request import RequestResult, RequestState
from kvstrata.tiers.scheduler import Scheduler
from kvstrata.tiers.tree import TreeCore

__all__ = [
    "CacheControl",
    "ComponentIdentity",
    "Deadlines",
    "EvictionPolicy",
    "KeyChain",
    "L3State",
    "Match",
    "Namespace",
    "Node",
    "PrefetchPolicy",
    "RequestResult",
    "RequestState",
    "RestorePolicy",
    "Scheduler",
    "SchedulerSettings",
    "TreeCore",
    "WritePolicy",
    "component_fingerprint",
    "page_keys",
    "partial_key",
    "policy_class",
    "root_key",
]
