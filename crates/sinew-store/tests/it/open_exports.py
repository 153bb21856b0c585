"""Opens exported episodes with pyarrow, DuckDB and datasets: each must see the same rows."""

import json
import sys

import datasets
import duckdb
import pyarrow.ipc
import pyarrow.parquet

folder, rows = sys.argv[1], int(sys.argv[2])
parquet, arrow, lines = (f"{folder}/episodes.{end}" for end in ("parquet", "arrow", "jsonl"))
file = pyarrow.parquet.ParquetFile(parquet)
assert file.num_row_groups > 1, "one row group would mean that all rows were in memory"
tables = [file.read().to_pylist()]
with pyarrow.ipc.open_file(arrow) as reader:
    tables.append(reader.read_all().to_pylist())
for kind, path in (("parquet", parquet), ("arrow", arrow)):
    cache = f"{folder}/cache"
    loaded = datasets.load_dataset(kind, data_files=path, split="train", cache_dir=cache)
    tables.append(loaded.to_list())
query = f"SELECT * FROM '{parquet}'"
named = duckdb.sql(query).to_arrow_table().to_pylist()
tables.append(named)
with open(lines, encoding="utf-8") as text:
    expected = [json.loads(line) for line in text]
assert len(expected) == rows
for row in expected:
    row["metrics"] = json.dumps(row["metrics"])
    row["messages"] = json.dumps(row["messages"])
    row["tools"] = json.dumps(row["tools"])
for table in tables:
    assert len(table) == rows, len(table)
    for row, right in zip(table, expected, strict=True):
        for name in ("metrics", "messages", "tools"):
            row[name] = json.dumps(json.loads(row[name]))
        left = [x if x is None else round(x, 4) for x in row.pop("logprobs")]
        assert left == [x if x is None else round(x, 4) for x in right["logprobs"]]
        rest = {name: value for name, value in right.items() if name != "logprobs"}
        assert row == rest, (row, rest)
failed = duckdb.sql(f"SELECT count(*) FROM '{parquet}' WHERE type = 'code' AND reward IS NULL")
print(json.dumps({"unscored_code": failed.fetchall()[0][0]}))
