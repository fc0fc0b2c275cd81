"""Budgets of workspace: for each moment of a step, and in total."""
