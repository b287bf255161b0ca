#!/usr/bin/env bash
# attend estimate against a real server: the table, the plots, JSON and the picture.
. "$(dirname "$0")/lib.sh"

start_server --drain_delay=0s --compute_threads=2
export ATTENDANT_SERVER=$address
estimate() { exits 0 "$1" "$bin/attend" estimate "${@:2}"; }

# The lesson's head, and its crossover at 2 * d_model.
estimate '^projections +960 +480 B +960 +480 B$' --tokens=5 --width=4 --d_model=8 --dtype=float64
for line in '^batch 1, heads 1, tokens 5, width 4, d_model 8, float64$' \
  '^scores +200 +200 B +200 ' '^softmax +125 +200 B +125 ' '^values +200 +160 B +200 +160 B$' \
  '^output_projection +320 +320 B +320 +320 B$' '^all steps +1\.805 k +1\.805 k$' \
  '^workspace +840 B +[0-9]' '^time +[0-9.]+ (us|ms) +[0-9.]+ (us|ms)$' \
  '^request +1\.312 KiB' '^response +320 B' '^crossover +16 tokens' '^time +of compute on 2 idle' \
  '^operations: a scores and values, p projections, # both, : crossover at 16$' '^time: e explicit path' \
  '^workspace: e explicit path, c chunked path' '^ +\+[-+]+$' 'K tokens$|[0-9] tokens$'; do
  grep -qE -- "$line" "$work/out" || { cat "$work/out" >&2; fail "no '$line'"; }
done

# Attention alone, and as few queries as a decoder has.
estimate '^scores +2\.149 G +128\.0 MiB' --tokens=2048 --width=64 --heads=8 --causal=top-left
! grep -qE '^(projections|crossover)' "$work/out" || fail "projections without d_model"
estimate '^batch 1, heads 8 over 2, queries 1, keys 4096, width 64, value width 32, float16$' \
  --queries=1 --keys=4096 --heads=8 --kv_heads=2 --width=64 --value_width=32 --dtype=float16
grep -qE ' keys$' "$work/out" || fail "not a plot over keys"
estimate '^crossover +none' --tokens=64 --width=4 --d_model=512 --window_left=8 --window_right=8
estimate '^request +0 B' --tokens=0 --width=4
estimate '^request +24\.12 KiB' --tokens=8 --width=64 --heads=4 --batch=2 --mask_shape=8,8 \
  --mask_dtype=bfloat16 --dtype=bfloat16 --key_lengths=3,8 --return_weights

# What a call takes is what was said.
estimate '"workspace_bytes"' --tokens=100 --width=16 --heads=2 --json
python3 - "$work/out" << 'PYTHON' || fail "not the JSON that was promised"
import json, sys
text = open(sys.argv[1]).read()
estimate = json.loads(text)
assert text.count("\n") == 1, "more than one line"
assert estimate["request_bytes"] == 3 * 2 * 100 * 16 * 4
assert estimate["response_bytes"] == 2 * 100 * 16 * 4
assert estimate["crossover_tokens"] == 0
for path in ("explicit_path", "chunked_path"):
    cost = estimate[path]
    assert [step["name"] for step in cost["steps"]] == ["scores", "softmax", "values"]
    assert cost["flops"] == sum(step["flops"] for step in cost["steps"])
    assert cost["workspace_bytes"] > 0 and cost["seconds"] > 0
PYTHON
for path in explicit chunked; do
  said=$(grep -o "\"${path}_path.*" "$work/out" | grep -oE '"workspace_bytes":[0-9]+' | head -1 |
    cut -d: -f2)
  cp "$work/out" "$work/estimate.json"
  exits 0 "^workspace +$said bytes" "$bin/attend" call --shape=1,2,100,16 --random=1 --path=$path
  cp "$work/estimate.json" "$work/out"
done

# The picture is XML, with each plot's curves.
estimate 'crossover' --tokens=2048 --width=64 --heads=8 --d_model=512 --svg="$work/cost.svg"
python3 - "$work/cost.svg" << 'PYTHON' || fail "not the picture that was promised"
import sys, xml.etree.ElementTree as tree
root = tree.parse(sys.argv[1]).getroot()
svg = "{http://www.w3.org/2000/svg}"
assert root.tag == svg + "svg"
assert len(root.findall(f".//{svg}polyline")) == 6
assert "crossover: 1024 tokens" in [text.text for text in root.iter(svg + "text")]
PYTHON

# What is wrong gets one line and its own exit code.
one_line() { [ "$(wc -l < "$work/out")" = 1 ] || { cat "$work/out" >&2; fail "more than one line"; }; }
exits 2 'give --tokens, or --queries and --keys' "$bin/attend" estimate --width=4
exits 2 'width is required' "$bin/attend" estimate --tokens=4
exits 2 'queries requires --keys' "$bin/attend" estimate --queries=4 --width=4
exits 2 'tokens: .x. is no whole number' "$bin/attend" estimate --tokens=x --width=4
exits 2 'mask_shape: .99999999999999999999. is no whole number' "$bin/attend" estimate --tokens=4 \
  --width=4 --mask_shape=4,99999999999999999999
exits 2 'mask_dtype requires --mask_shape' "$bin/attend" estimate --tokens=4 --width=4 \
  --mask_dtype=bool
exits 5 'width: is -4, must be 0 or more' "$bin/attend" estimate --tokens=4 --width=-4
one_line
exits 5 'kv_heads: is 3, must divide heads, which is 8' "$bin/attend" estimate --tokens=4 --width=4 \
  --heads=8 --kv_heads=3
one_line
exits 5 'keys: is 5, must be 4 .queries, where d_model' "$bin/attend" estimate --queries=4 --keys=5 \
  --width=4 --d_model=8
one_line
exits 5 'options.mask.shape\[1\]: is 3, must be 1 or 4' "$bin/attend" estimate --tokens=4 --width=4 \
  --mask_shape=4,3
one_line
exits 2 '^--svg: .*picture.png. must end in .svg' "$bin/attend" estimate --tokens=4 --width=4 --svg=picture.png
exits 2 '^--tokens: is less than 0' "$bin/attend" estimate --tokens=-3 --width=4
exits 4 'cannot be written' "$bin/attend" estimate --tokens=4 --width=4 --svg=/no/such/folder/x.svg
kill -TERM "$server_pid"
wait "$server_pid" || fail "the server did not exit 0"
server_pid=

# Without a measurement there is no time, and everything else.
start_server --drain_delay=0s --measure_peak=false
export ATTENDANT_SERVER=$address
estimate '^time +not measured +not measured$' --tokens=64 --width=4
grep -qE '^time +not measured by this server' "$work/out" || fail "does not say why"
! grep -qE '^time:' "$work/out" || fail "a plot of times that were not measured"
echo "passed"
