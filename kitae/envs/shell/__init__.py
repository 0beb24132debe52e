"""Agents with a shell in a box: tasks as folders and rows, tools, and tests in a box that the agent never reached."""
