"""Making a conversation fit into the model's context."""

from sessions.context.budget import Budget
from sessions.context.fitted import Fitted
from sessions.context.policy import POLICIES, fit

__all__ = ["POLICIES", "Budget", "Fitted", "fit"]
