# In the root of a checkout of branch attn; .gpu of the main checkout carried, or attn_bench.py beside this file.
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . 2>&1 | grep -v WARN
nvidia-smi --query-gpu=name --format=csv,noheader
timeout 100 python3 "$(dirname "$0")/attn_bench.py" 2>&1 | grep -v Warn | cut -c1-400
