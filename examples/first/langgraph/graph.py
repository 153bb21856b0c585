"""The agent as it was before: a graph of one model node."""

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph


def answer(state: MessagesState) -> dict:
    return {"messages": [ChatOpenAI(model="policy").invoke(state["messages"])]}


graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile()
