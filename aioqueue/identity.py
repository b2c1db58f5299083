"""What policies go by in a job's transaction: the settings that carry its tenant and what else they read, and the role.

Made of TenantSettings and a job's facts; sets nothing itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from .claimed import Claimed, JobFacts
from .errors import ConfigurationError
from .settings import OWN_SETTINGS, TenantSettings, check_setting_name

MARKER = f"{OWN_SETTINGS}marker"
"""The setting that only the transaction that was opened for a job has."""
ROLE = f"{OWN_SETTINGS}role"
"""The setting that keeps which role user code ended as."""


@dataclass(slots=True)  # frozen, it would cost each job three times as much to make one
class Identity:
    """The settings of a transaction by name, and the role that user code runs as; None: the worker's own."""

    settings: Mapping[str, str]
    role: str | None

    @classmethod
    def of(cls, job: Claimed, tenants: TenantSettings) -> Identity:
        """Return a job's. Raises ConfigurationError where `values` or `role` give what cannot be set, and what they raise."""
        settings = {tenants.setting: job.tenant or ""}
        if tenants.values is None and (tenants.role is None or isinstance(tenants.role, str)):
            return cls(settings, tenants.role)
        facts = JobFacts(job)
        if tenants.values is not None:
            for name, value in tenants.values(facts).items():
                check_setting_name("tenants values", name)
                # The server takes no notice of case.
                if name.lower() == tenants.setting.lower() or name.lower().startswith(OWN_SETTINGS):
                    raise ConfigurationError(f"tenants values: the setting {name} is aioqueue's own to set")
                given: object = value
                if not isinstance(given, str) or "\x00" in given:
                    raise ConfigurationError(f"tenants values: {name}: expected a text without NUL, got {value!r:.80}")
                settings[name] = value
        role: object = tenants.role(facts) if callable(tenants.role) else tenants.role
        if role is not None and not (isinstance(role, str) and role.strip()):
            raise ConfigurationError(f"tenants role: expected a role's name or None, got {role!r:.80}")
        return cls(settings, role)

    @classmethod
    def of_tenant(cls, job: Claimed, tenants: TenantSettings, tenant: str) -> Identity:
        """Return what it would be if the job were that tenant's."""
        return cls.of(dataclasses.replace(job, tenant=tenant), tenants)
