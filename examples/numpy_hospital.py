"""A hospital that trains a small network by gradients of its own, as JAX would give them, on the data of
`my_hospital.py`. With JAX, `loss_and_gradients` is `jax.value_and_grad(loss)`.
"""

import os
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer

from umbel.client import ArrayClient, ArrayData, Evaluation, LocalPlan, TrainResult


class Hospital(ArrayClient):
    def __init__(self, features: Any, labels: Any) -> None:
        self.data, self.holdout = ArrayData(features[30:], labels[30:]), (features[:30], labels[:30])
        rng = np.random.default_rng(0)
        first, last = rng.normal(0, 0.2, (30, 16)), rng.normal(0, 0.2, (16, 1))
        arrays = {"w1": first, "b1": np.zeros(16), "w2": last, "b2": np.zeros(1)}
        super().__init__({name: array.astype(np.float32) for name, array in arrays.items()}, len(self.data))

    def train_arrays(self, arrays: Any, plan: LocalPlan) -> tuple[Any, TrainResult]:
        steps = plan.drive(self.data, keep={"arrays": arrays})  # a killed training resumes here
        for features, labels in steps:
            loss, gradients = loss_and_gradients(arrays, features, labels)
            # FedProx, clipping, and the part that the codec can send:
            for name, gradient in plan.adjust_arrays(gradients, arrays).items():
                arrays[name] -= plan.learning_rate * gradient
            steps.note(loss=loss)
        return arrays, steps.result(self.sample_count)

    def evaluate_arrays(self, arrays: Any) -> Evaluation:
        features, labels = self.holdout
        _, logits = forward(arrays, features)
        return Evaluation(len(labels), {"accuracy": float(np.mean((logits > 0) == labels))})


def forward(arrays: Any, features: Any) -> tuple[Any, Any]:
    """The hidden layer and one logit for each sample."""
    hidden = np.tanh(features @ arrays["w1"] + arrays["b1"])
    return hidden, (hidden @ arrays["w2"] + arrays["b2"])[:, 0]


def loss_and_gradients(arrays: Any, features: Any, labels: Any) -> tuple[float, dict[str, Any]]:
    """The mean cross-entropy of a batch and, by back-propagation, its gradients by array."""
    hidden, logits = forward(arrays, features)
    loss = np.mean(np.logaddexp(0, logits) - labels * logits)
    d_logits = ((1 / (1 + np.exp(-logits)) - labels) / len(labels))[:, None]
    d_hidden = d_logits @ arrays["w2"].T * (1 - hidden**2)
    gradients = {"w1": features.T @ d_hidden, "b1": d_hidden.sum(0), "w2": hidden.T @ d_logits, "b2": d_logits.sum(0)}
    return float(loss), gradients


def client() -> Hospital:
    hospital, n_hospitals = int(os.environ.get("HOSPITAL", "0")), 4
    values, classes = load_breast_cancer(return_X_y=True)
    features = np.log1p(values[hospital::n_hospitals])
    return Hospital(
        ((features - features.mean(0)) / features.std(0)).astype(np.float32), classes[hospital::n_hospitals]
    )
