"""A ReAct agent of LangChain, which runs on LangGraph, with one tool, then a second question in the same talk."""

import json
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def main() -> None:
    model = ChatOpenAI(model="gpt-4o")
    agent = create_agent(model, [add], system_prompt="Use the tool.", checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    for question in (json.load(sys.stdin)["question"], "Are you sure?"):
        agent.invoke({"messages": [{"role": "user", "content": question}]}, thread)


main()
