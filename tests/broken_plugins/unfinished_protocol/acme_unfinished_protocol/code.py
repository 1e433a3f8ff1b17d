"""The code behind the declarations."""

from hp_core.contracts import EPContext


class Acme(EPContext):
    """Sends tokens and never fetches them."""

    def __init__(self, mesh, options):
        """Take nothing."""

    def dispatch(self, hidden, expert_indices, routing_weights):
        """Stand for sending."""
