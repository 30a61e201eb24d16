# bash .gpu/exp.sh: the experiments of the training kernels, on one GPU, about 150 s
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . 2>&1 | grep -v WARN
nvidia-smi --query-gpu=name --format=csv,noheader
for b in rs_bench wgrad_bench gather_bench; do timeout 90 python3 $b.py > $OUT/$b.log 2>&1; echo "$b $?"; tail -9 $OUT/$b.log | cut -c1-600; done
timeout 100 python3 -m benchmarks training --only experts --profile --out $OUT > $OUT/profile.log 2>&1; tail -90 $OUT/profile.log | cut -c1-140
