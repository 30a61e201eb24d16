from tools.compile_matrix import rows
for d in ("cpu", "cuda"):
    try: print(d, list(rows(["dequantize, mxfp4"], d, columns=("export",))))
    except BaseException as e: print(d, repr(e)[:1500])
