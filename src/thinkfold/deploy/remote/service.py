"""Whether an operator's classes of service can be had over a remote server; asked once, at start."""

from __future__ import annotations

from thinkfold.deploy.remote.engine import RemoteEngine
from thinkfold.deploy.remote.orders import NEEDS_KV
from thinkfold.errors import ParameterError
from thinkfold.server.state import ServerOptions
from thinkfold.types import ControlParams


def check_service(engine: RemoteEngine, options: ServerOptions) -> None:
    """Raise ParameterError that names the setting, or the tier, which no request could have."""
    if engine.model.budget_enforced:
        _check_control(engine, options.control, "early_stop")
    for tier in options.tiers.tiers.values() if options.tiers is not None else ():
        where = f"tiers.{tier.tier.name}"
        if tier.tier.kv_quota < 1.0:
            raise ParameterError(f"{where}.kv_quota", NEEDS_KV)
        _check_control(engine, tier.control, f"{where}.control")
        try:
            engine.resolve_fold(tier.fold_of(None))
        except ParameterError as error:
            raise ParameterError(f"{where}.fold", error.message) from None


def _check_control(engine: RemoteEngine, control: ControlParams | None, where: str) -> None:
    try:
        engine.remote.line.dialect.check_control(control)
    except ParameterError as error:
        raise ParameterError(where, error.message) from None
