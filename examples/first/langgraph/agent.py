import os
from graph import graph
print(graph.invoke({"messages": [("user", os.environ["SINEW_TASK"])]})["messages"][-1].content)
