from graph import graph
async def solve(task, model):
    said = (await graph.ainvoke({"messages": [("user", task.prompt)]}))["messages"][-1].content
    return sum("a" <= c <= "z" for c in said) / max(len(said), 1)
