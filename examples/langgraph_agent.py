"""An agent on LangGraph: a graph of a model node and a tool node, with a ChatOpenAI model.

It reads OPENAI_BASE_URL, OPENAI_API_KEY and SINEW_TASK, and prints its answer.
"""

import os

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from calculator import calculate
from prompts import MAX_TURNS, SYSTEM, WORKED


@tool
def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    return calculate(expression)


def worked_examples() -> list:
    messages = []
    for number, (question, expression, result) in enumerate(WORKED):
        call = {"id": f"example{number}", "name": "calculator", "args": {"expression": expression}}
        messages += [
            HumanMessage(question),
            AIMessage("", tool_calls=[call]),
            ToolMessage(result, tool_call_id=call["id"]),
            AIMessage(f"Answer: {result}"),
        ]
    return messages


def build_graph():
    model = ChatOpenAI(model="policy").bind_tools([calculator])

    def think(state: MessagesState) -> dict:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


def main() -> None:
    messages = [SystemMessage(SYSTEM), *worked_examples(), HumanMessage(os.environ["SINEW_TASK"])]
    answer = ""
    try:
        steps = build_graph().stream(
            {"messages": messages}, {"recursion_limit": 2 * MAX_TURNS}, stream_mode="values"
        )
        for state in steps:
            last = state["messages"][-1]
            if isinstance(last, AIMessage) and last.content:
                answer = last.content
    except GraphRecursionError:
        pass
    print(answer)


if __name__ == "__main__":
    main()
