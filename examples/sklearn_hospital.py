"""A hospital that trains a logistic regression with scikit-learn, on the data of `my_hospital.py`."""

import os
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import scale

from umbel.client import ArrayClient, ArrayData, Evaluation, LocalPlan, TrainResult


class Hospital(ArrayClient):
    def __init__(self, features: Any, labels: Any) -> None:
        self.data, self.holdout = ArrayData(features[30:], labels[30:]), (features[:30], labels[:30])
        super().__init__({"coef": np.zeros((1, 30)), "intercept": np.zeros(1)}, len(self.data))

    def train_arrays(self, arrays: Any, plan: LocalPlan) -> tuple[Any, TrainResult]:
        steps = plan.drive(self.data, keep={"arrays": arrays})  # a killed training resumes here
        for features, labels in steps:
            rate = plan.learning_rate / len(labels)  # scikit-learn takes a step for each sample, not for each batch
            model = classifier(arrays, learning_rate="constant", eta0=rate, alpha=plan.weight_decay, shuffle=False)
            model.partial_fit(features, labels, classes=[0, 1])
            # FedProx, clipping, and the part that the codec can send:
            arrays.update(plan.adjust_step(arrays, {"coef": model.coef_, "intercept": model.intercept_}))
        return arrays, steps.result(self.sample_count)

    def evaluate_arrays(self, arrays: Any) -> Evaluation:
        features, labels = self.holdout
        return Evaluation(len(labels), {"accuracy": classifier(arrays).score(features, labels)})


def classifier(arrays: Any, **arguments: Any) -> Any:
    model: Any = SGDClassifier("log_loss", **arguments)
    model.classes_, model.coef_, model.intercept_ = np.arange(2), arrays["coef"].copy(), arrays["intercept"].copy()
    return model


def client() -> Hospital:
    hospital, n_hospitals = int(os.environ.get("HOSPITAL", "0")), 4
    values, classes = load_breast_cancer(return_X_y=True)
    return Hospital(scale(np.log1p(values[hospital::n_hospitals])), classes[hospital::n_hospitals])
