"""The layers of a model in the order of their calls, with the work of each."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from umbel.client.datacenter.doctor.layers import CountedStep, LayerCost

N, WIDTH = 5, 8


class Block(nn.Module):
    """A sequence inside of it is skipped by a sum, so that no stage can end there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = inputs + self.net(inputs)
        return found


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, inputs: Tensor) -> Tensor:
        for one in self.layer:
            inputs = one(inputs)
        return inputs


class Model(nn.Module):
    """Its head is registered first and called last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)
        self.tokens = nn.Embedding(10, WIDTH)
        self.encoder = Encoder()
        self.ends = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "unused": nn.Linear(3, 3)})

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.ends["norm"](self.encoder(self.tokens(tokens))))
        return found


def counted(model: nn.Module, inputs: Tensor) -> CountedStep:
    with CountedStep(model) as found:
        model(inputs).sum().backward()
    return found


def test_the_work_of_a_layer_is_its_products_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Sequential(nn.Linear(WIDTH, 2, bias=False)))
    found = counted(model, torch.ones(N, 3))
    first, last = 2 * N * 3 * WIDTH, 2 * N * WIDTH * 2
    assert found.layers() == [
        LayerCost("0", 2 * first, 4 * (3 * WIDTH + WIDTH)),  # no gradient of the inputs
        LayerCost("1", 0, 0),
        LayerCost("2.0", 3 * last, 4 * WIDTH * 2),
    ]
    assert found.flops == 2 * first + 3 * last


def test_blocks_of_a_transformer_are_layers_in_the_order_of_their_calls_and_stay_whole() -> None:
    found = counted(Model(), torch.zeros(N, dtype=torch.int64)).layers()
    assert [one.name for one in found] == [
        "tokens",
        *(f"encoder.layer.{number}" for number in range(3)),
        "ends.norm",
        "ends.unused",
        "head",
    ]
    block = 2 * 3 * 2 * N * WIDTH * 4 * WIDTH
    assert [one.flops for one in found] == [0, block, block, block, 0, 0, 3 * 2 * N * WIDTH * 2]


class Attention(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(inputs, inputs, inputs)


class Last(nn.Module):
    """The outputs of a recurrent layer, which also returns its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)[0]
        return outputs


def test_attention_and_recurrent_layers_are_counted_on_processors_too() -> None:
    heads, length = 4, 6
    attention = counted(Attention(), torch.ones(N, heads, length, WIDTH, requires_grad=True))
    product = 2 * N * heads * length * length * WIDTH
    assert attention.flops == 2 * product + 5 * product, "the backward pass computes the scores again"
    for kind, gates in ((nn.RNN, 1), (nn.LSTM, 4)):
        found = counted(Last(kind(WIDTH, 3)), torch.ones(length, N, WIDTH))
        forward = 2 * gates * length * N * 3 * (WIDTH + 3)
        assert 2 * forward <= found.layers()[0].flops <= 3 * forward


def test_a_model_without_children_is_one_layer() -> None:
    assert counted(nn.Linear(3, 2), torch.ones(N, 3)).layers() == [LayerCost("Linear", 2 * 2 * N * 3 * 2, 32)]


def test_a_model_that_is_called_in_parts_has_no_counted_layers_but_counted_work() -> None:
    model = Model()
    with CountedStep(model) as found:
        model.head(torch.ones(N, WIDTH)).sum().backward()
    assert not any(one.flops for one in found.layers())
    assert found.flops == 2 * 2 * N * WIDTH * 2


def test_nothing_is_counted_after_the_block() -> None:
    model = Model()
    found = counted(model, torch.zeros(N, dtype=torch.int64))
    work, layers = found.flops, found.layers()
    model.ends["unused"](torch.ones(N, 3)).sum().backward()
    assert found.flops == work
    assert found.layers() == layers, "nor is the order of calls noted"
