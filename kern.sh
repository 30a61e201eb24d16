# bash .gpu/kern.sh: weight gradients with block scales and the transposing quantizers, on one GPU, about 120 s
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . 2>&1 | grep -v WARN
nvidia-smi --query-gpu=name --format=csv,noheader
timeout 180 python3 "$(dirname "$0")/kern_bench.py" > $OUT/kern.log 2>&1; echo "kern_bench $?"; cut -c1-700 $OUT/kern.log
