# On an H200: the probe of reading patterns, times of more shapes for the cost model, what was not measured yet.
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit 1
export PYTHONPATH=.
timeout 120 python3 experiments/stream.py 2>&1 | grep TB/s
timeout 120 python3 experiments/more_times.py 63 64 65; date +%s
for b in batch_invariance warmup; do timeout 200 python3 -m benchmarks.$b --out $OUT 2>&1 | tail -12 | cut -c1-160; date +%s; done
