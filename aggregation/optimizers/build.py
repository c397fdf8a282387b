"""The server optimizer that a run file asks for."""

from umbel.aggregation.optimizers.adaptive import adagrad, adam, yogi
from umbel.aggregation.optimizers.feddyn import feddyn
from umbel.aggregation.optimizers.layerwise import lamb, lars
from umbel.aggregation.optimizers.momentum import momentum
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.optimizers.server_optimizer import ServerOptimizer
from umbel.aggregation.optimizers.sgd import sgd
from umbel.aggregation.plans.training import TrainingTerms


def optimizer_of(section: AggregationSection, training: TrainingTerms) -> ServerOptimizer:
    """The one of these sections of a run file. FedDyn brings its own, in the place of "sgd".

    If the file does not say with what the second moment begins, that is tau^2, the least that Reddi et al. ask for;
    with bias correction zero.
    """
    if training.remembers_drift:
        return feddyn()
    of = section.of
    match section.optimizer:
        case "sgd":
            return sgd()
        case "momentum" | "nesterov":
            return momentum(of("momentum"), nesterov=section.optimizer == "nesterov")
        case "adagrad":
            return adagrad(of("beta1"), of("tau"), of("v0"))
        case "yogi":
            return yogi(of("beta1"), of("beta2"), of("tau"), of("v0"))
        case "adam":
            first = section.bias_correction_from if section.bias_correction else None
            return adam(of("beta1"), of("beta2"), of("tau"), of("v0"), corrected_from=first)
        case "lars":
            return lars(of("momentum"), of("trust"))
        case "lamb":
            return lamb(of("beta1"), of("beta2"), of("tau"))
