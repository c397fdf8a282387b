"""Flower's strategies with a step of the server, as keys of `[aggregation]`.

`tests/aggregation/optimizers/test_flower_strategies.py` shows that with these keys the steps are equal.
"""

from typing import Any

from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

STRATEGIES = (FedAdam, FedYogi, FedAdagrad, FedAvgM)


def aggregation_of(strategy: FedAvg) -> dict[str, Any]:
    """The keys; empty for a strategy that takes the mean itself for the next model.

    Flower's second moments begin with 0. Its FedAdam corrects the rate of round n with the exponent n + 1.
    """
    match strategy:
        case FedAdam():
            betas = {"beta1": strategy.beta_1, "beta2": strategy.beta_2}
            return _keys("adam", strategy.eta, tau=strategy.tau, **betas, bias_correction=True, bias_correction_from=2)
        case FedYogi():
            betas = {"beta1": strategy.beta_1, "beta2": strategy.beta_2}
            return _keys("yogi", strategy.eta, tau=strategy.tau, **betas, v0=0.0)
        case FedAdagrad():
            return _keys("adagrad", strategy.eta, tau=strategy.tau, beta1=strategy.beta_1, v0=0.0)
        case FedAvgM() if strategy.server_momentum > 0.0:
            return _keys("momentum", strategy.server_learning_rate, momentum=strategy.server_momentum)
        case FedAvgM() if strategy.server_opt:
            return _keys("sgd", strategy.server_learning_rate)
        case _:
            return {}


def _keys(optimizer: str, rate: float, **more: float) -> dict[str, Any]:
    return {"optimizer": optimizer, "server_learning_rate": rate, **more}
