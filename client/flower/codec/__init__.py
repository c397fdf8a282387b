"""umbel's compression for Flower's Message API: a mod for the ClientApp, and a strategy for the ServerApp.

```python
app = ClientApp(mods=[compressing])  # in the ClientApp
strategy = Compressed(FedAvg())  # in the ServerApp
```

Only what clients send after training is compressed. Neither umbel's coordinator nor its client is needed. A legacy app
(`NumPyClient` with `client_fn`) cannot use it: its ServerApp has no strategy of the Message API.
"""

from umbel.client.flower.codec.mod import compressing
from umbel.client.flower.codec.strategy import Compressed

__all__ = ["Compressed", "compressing"]
