"""Launch plans, built once for each problem and kept: `PlanCache`."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from fp8moe.runtime import config

Plan = TypeVar("Plan")

_MAX_PLANS = 4096  # prefill asks for a new number of tokens at almost every step


class PlanCache(Generic[Plan]):
    """Plans by key and by the settings that hold. Past 4096 the oldest goes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Plan | None:
        """The plan that was built for `key`, or None."""
        settings = config.settings
        return self._plans.get((settings.num_sms, settings.batch_invariant, key))

    def get(self, key: Hashable, build: Callable[[], Plan]) -> Plan:
        """The plan of `key`, from ``build()`` if there is none yet."""
        plan = self.find(key)
        return self._keep(key, build()) if plan is None else plan

    def _keep(self, key: Hashable, plan: Plan) -> Plan:
        settings = config.settings
        with self._lock:
            if len(self._plans) >= _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[settings.num_sms, settings.batch_invariant, key] = plan
        return plan
