"""The smallest graph: one model node of LangGraph.

It reads OPENAI_BASE_URL, OPENAI_API_KEY and SINEW_TASK, and prints the answer.
"""

import os

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph


def main() -> None:
    model = ChatOpenAI(model="policy")
    graph = StateGraph(MessagesState)
    graph.add_node("reply", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "reply")
    graph.add_edge("reply", END)
    state = graph.compile().invoke({"messages": [HumanMessage(os.environ["SINEW_TASK"])]})
    print(state["messages"][-1].content)


if __name__ == "__main__":
    main()
