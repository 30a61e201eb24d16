# One call on an H200: old (a tree of main) against new (a tree of next), both below .scratch.
# bash .scratch/new/experiments/n1.sh
cd .scratch/new
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit 1
python3 -m pytest -q -m gpu -n 6 --dist loadfile tests/gpu -k "gemm or grouped or batch or rows or mqa or index" 2>&1 | tail -15
tiles() { python3 -m benchmarks.compare ../old --turns 3 --out $OUT/$1 --only "$2" --tiles "${@:3}" 2>&1 | grep -v "^$" | tail -30; }
tiles a '^(gemm|cublas) m=64 n=4096 k=7168$' '64x64/2*1' '64x128/4*1' '64x64/2*2' '64x96/3*1'
tiles b '^(gemm|cublas) m=128 n=4096 k=7168$' '128x128/4*1' '128x64/2*1' '128x192/5*1' '128x96/3*1'
tiles c '^(gemm|cublas) m=512 n=2112 k=7168$' '128x192/3*1' '128x128/2*1' '128x176/2*1' '128x64*1'
tiles d '^(gemm|cublas) m=(1|16) n=(2112|4096|576) k=7168$' '8x64/4*1' '8x64/8*1' '16x64/4*1' '16x64/8*1'
