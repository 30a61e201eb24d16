"""Emulate the exchange and epilogue of gemm.cu on the CPU: all threads of all blocks of one cluster."""
import re, os, sys, subprocess, shutil, torch, ctypes, itertools
ROOT=os.path.dirname(os.path.dirname(os.path.abspath(__file__))); sys.path.insert(0, ROOT); WORK=os.environ.get('EMU_WORK') or __import__('tempfile').mkdtemp(); os.makedirs(WORK, exist_ok=True)
from fp8moe.kernels.gemm.config import GemmConfig, with_stages, fits
from fp8moe.kernels.gemm.source import kernel_spec, arguments_type
from fp8moe.kernels.gemm.epilogue import PlainStore, AddAndStore
src=ROOT+'/fp8moe/cuda'; D=WORK+'/cuda'
shutil.rmtree(D,ignore_errors=True); shutil.copytree(src,D)
s=open(D+'/ptx.cuh').read()
# strip asm statements
out=[];i=0
while True:
    j=re.search(r'\basm\s*(volatile)?\s*\(',s[i:])
    if not j: out.append(s[i:]); break
    a=i+j.start(); out.append(s[i:a]); d=0;k=i+j.end()-1
    while True:
        c=s[k]
        if c=='"':
            k+=1
            while s[k]!='"': k+= 2 if s[k]=='\\' else 1
        elif c=='(': d+=1
        elif c==')':
            d-=1
            if d==0: break
        k+=1
    k=s.index(';',k); i=k+1
s=''.join(out); s=re.sub(r'  for \(int i = 0; i < Accumulators; \+\+i\) [^\n]*\n','',s)
def body(name,new):
    global s
    m=re.search(r'__device__ __forceinline__ [^\n]*\b'+name+r'\([^{]*\) \{',s); assert m,name
    k=m.end(); d=1
    while d:
        d+= {'{':1,'}':-1}.get(s[k],0); k+=1
    s=s[:m.end()]+new+'}'+s[k:]
body('shared_address','return emu_shared(p);')
body('lane_id','return emu_thread%32;')
body('cluster_rank','return emu_rank;')
body('cluster_address','return address | (rank+1) << 24;')
body('store_to_block','emu_store(target, v, barrier);')
body('mbarrier_arrive_expect_tx','emu_expect(barrier, bytes);')
body('mbarrier_wait_cluster','emu_wait(barrier);')
body('pack_bfloat16','return 0;')
s=s.replace('__shfl_sync(0xFFFFFFFF, x, 0)','x')
open(D+'/ptx.cuh','w').write('#include "../stub.h"\n'+s)
w=open(D+'/warp.cuh').read()
open(D+'/warp.cuh','w').write('#pragma once\n#include "ptx.cuh"\nconstexpr u32 FULL_WARP=~0u;\n template<int W=32,class T,class F> T warp_reduce(T x,F){return x;} inline int warp_inclusive_sum(int x){return x;}\n')
open(WORK+'/stub.h','w').write(r'''
#pragma once
#include <cstdint>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <vector>
#include <map>
#include <algorithm>
#define __device__
#define __shared__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
using std::min; using std::max;
struct alignas(16) float4{float x,y,z,w;}; struct alignas(8) float2{float x,y;}; struct alignas(16) uint4{unsigned x,y,z,w;}; struct alignas(8) uint2{unsigned x,y;};
inline float4 make_float4(float a,float b,float c,float d){return {a,b,c,d};} inline float2 make_float2(float a,float b){return {a,b};}
inline uint2 make_uint2(unsigned a,unsigned b){return {a,b};}
inline float __fadd_rn(float a,float b){return a+b;}
inline float __uint_as_float(unsigned x){float f;memcpy(&f,&x,4);return f;}
inline void __syncwarp(){}
template<class T> T __shfl_sync(unsigned,T x,int){return x;}
template<class T> size_t __cvta_generic_to_shared(T p){return 0;}
extern int emu_thread, emu_rank;
struct Dim{ struct X{ operator int() const; } x; };
struct Tid{ struct X{ operator int() const {return emu_thread;} } x; }; inline Tid threadIdx;
struct Bid{ int x=0,y=0,z=0; }; inline Bid blockIdx, gridDim;
unsigned emu_shared(const void*p);
void emu_store(unsigned target,const float*v,unsigned barrier);
void emu_expect(unsigned barrier,unsigned bytes);
void emu_wait(unsigned barrier);
''')
main=r'''
int emu_thread, emu_rank;
static std::vector<std::vector<unsigned char>> mem; static long sent[16], expected[16]; static bool sending;
static std::vector<std::vector<char>> touched;
struct Stop{};
static void die(const char*m){printf("FAIL %s\n",m);exit(1);}
unsigned emu_shared(const void*p){ long d=(const unsigned char*)p-mem[emu_rank].data(); if(d<0||d>=(long)sizeof(Shared))die("address"); return d;}
static Shared& sh(int r){return *reinterpret_cast<Shared*>(mem[r].data());}
void emu_store(unsigned t,const float*v,unsigned b){ if(!sending)return; int r=(t>>24)-1,rb=(b>>24)-1; if(r!=rb||r==emu_rank)die("target block"); t&=0xffffff;b&=0xffffff;
 long e=(unsigned char*)sh(r).epilogue-mem[r].data(), sb=(unsigned char*)&sh(r).sums-mem[r].data();
 if(b!=sb)die("barrier"); if(t<e||t+16>e+RECEIVED_BYTES||t%16)die("bounds"); for(int i=0;i<16;i++) if(touched[r][t+i]++)die("twice"); memcpy(mem[r].data()+t,v,16); sent[r]+=16;}
void emu_expect(unsigned b,unsigned bytes){expected[emu_rank]+=bytes;}
void emu_wait(unsigned b){ if(sending) throw Stop(); }
int main(int argc,char**argv){
 int m=atoi(argv[1]); int group_first=argc>2?atoi(argv[2]):0;
 const int T=WARPGROUP*WARPGROUPS; using Sum=float[SLABS][ACCUMULATORS];
 mem.assign(SPLIT_K,std::vector<unsigned char>(sizeof(Shared)+64,0xff)); 
 int tile_m = argc>3?atoi(argv[3]):BLOCK_M;
 long pitch=N+8; std::vector<float> out((m+4)*pitch,-777.f), c((m+4)*pitch);
 for(size_t i=0;i<c.size();i++) c[i]=i%97;
 for(int tm=0;tm<m;tm+=tile_m) for(int tn=0;tn<N;tn+=BLOCK_N){
  Tile tile{tm,tn,std::min(m,tm+tile_m),0};
  touched.assign(SPLIT_K,std::vector<char>(sizeof(Shared),0)); memset(sent,0,sizeof sent); memset(expected,0,sizeof expected);
  for(auto&x:mem) std::fill(x.begin(),x.end(),0xff);
  std::vector<float> regs((size_t)SPLIT_K*T*SLABS*ACCUMULATORS);
  auto value=[&](int r,int t,int f){ return 0.1f*(r+1)+ (float)((t*131+f*17+r*7919)%1009)/ (r+3); };
  auto fill=[&](int r,int th,Sum&s){ int wg=th/128,w=th/32%4,l=th%32; for(int sl=0;sl<SLABS;sl++)for(int j=0;j<COLUMNS/8;j++)for(int i=0;i<4;i++){
     int row=slab_row(wg,sl)+w*16+l/4+(i/2)*8, col=slab_column(sl)+8*j+2*(l%4)+i%2; int t=SWAP?col:row,f=SWAP?row:col; s[sl][4*j+i]=value(r,t,f);} };
  for(int r=0;r<SPLIT_K;r++){ emu_rank=r; Split split; if constexpr(SPLIT_K>1) Exchange{sh(r),tile,r}.expect(); }
  if constexpr(SPLIT_K>1){ sending=true; for(int r=0;r<SPLIT_K;r++)for(int th=0;th<T;th++){ emu_rank=r;emu_thread=th; Sum s; fill(r,th,s); try{ Exchange{sh(r),tile,r}.add_up(s,th/128);}catch(Stop){} }
   for(int r=0;r<SPLIT_K;r++) if(sent[r]!=expected[r]){printf("rank %d sent %ld expected %ld\n",r,sent[r],expected[r]);die("bytes");} sending=false; }
  Epilogue::Output o; o.data=out.data(); o.pitch=pitch; ADDEND
  TensorMap tmap;
  for(int r=0;r<SPLIT_K;r++){ emu_rank=r; std::vector<std::array<float,SLABS*ACCUMULATORS>> all(T); Split split;
   for(int th=0;th<T;th++){ emu_thread=th; Sum& s=*reinterpret_cast<Sum*>(all[th].data()); fill(r,th,s); if constexpr(SPLIT_K>1) Exchange{sh(r),tile,r}.add_up(s,th/128); if constexpr(SWAP) Sums{sh(r),tile,split}.gather(s,th/128);}
   for(int th=0;th<T;th++){ emu_thread=th; Epilogue ep{sh(r),o,tmap}; Sum& s=*reinterpret_cast<Sum*>(all[th].data()); if constexpr(SWAP) ep.from_sums(Sums{sh(r),tile,split}); else ep.from_registers(s,tile,th/128,split);} }
  for(int t=0;t<tile.end-tm;t++)for(int f=0;f<BLOCK_N&&tn+f<N;f++){ float e=value(0,t,f); for(int r=1;r<SPLIT_K;r++) e+=value(r,t,f); if(HASC) e+=c[(tm+t)*pitch+tn+f]; float g=out[(tm+t)*pitch+tn+f]; if(g!=e){printf("t %d f %d got %g expected %g\n",tm+t,tn+f,g,e);die("value");} out[(tm+t)*pitch+tn+f]=-777.f; }
 }
 for(float x:out) if(x!=-777.f) die("outside");
 return 0; }
'''
cases=[]
for split in ([int(x) for x in sys.argv[1:]] or range(1,9)):
    for t in (8,16,32):
        for n,w in ((64,1),(128,2)): cases.append(GemmConfig(t,n,swap=True,warpgroups=w,split_k=split))
    for n in (32,64,96,128): cases.append(GemmConfig(64,n,warpgroups=1,split_k=split))
    for n in (64,96,112,128,160,176,192,256): cases.append(GemmConfig(128,n,split_k=split))
    cases.append(GemmConfig(256,128,split_k=split))
for split in (1,2,8):
    for t in (8,16,32): cases.append(GemmConfig(t,256,swap=True,split_k=split))
def run(c):
    k=7168
    c=with_stages(c,k)
    if not fits(c,k): return 'unfit'
    n=c.block_n*2-24 if c.block_n>32 else 40
    res=[]
    for ep,add in ((PlainStore(torch.float32),''),(AddAndStore(torch.float32,None),'o.addend.c=c.data(); o.addend.c_pitch=pitch; o.addend.bias=nullptr;')):
        spec=kernel_spec(c,n,k,ep)
        pre=spec.prelude
        i=pre.index('__device__') if '__device__' in pre else pre.index('#include')
        consts=pre[:i]; 
        text='#include "stub.h"\n#include <array>\n'+consts+'\n#include "cuda/'+ep.header+'"\nusing Epilogue='+('Store<Bias>' if not add else 'Store<BiasAndMatrix>')+';\n'+main.replace('ADDEND',add).replace('HASC','1' if add else '0')
        name=WORK+'/b/%s_%s'%(hash(str(c))&0xffffffff,len(add)); os.makedirs(WORK+'/b',exist_ok=True)
        open(name+'.cpp','w').write(text)
        p=subprocess.run(['g++','-std=c++20','-O1','-w','-fpermissive','-I',WORK,name+'.cpp','-o',name],capture_output=True,text=True)
        if p.returncode: return 'COMPILE '+p.stderr[:1500]
        for m in sorted({1,2,3,7,8,c.block_m//2+1,c.block_m-1,c.block_m,c.block_m+5}):
            p=subprocess.run([name,str(m)],capture_output=True,text=True)
            if p.returncode: return 'm=%d %s %s'%(m,p.stdout,p.returncode)
    return 'ok'
if __name__=='__main__':
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(2) as ex:
        res=list(ex.map(run,cases))
    from collections import Counter
    print(Counter(r if r in('ok','unfit') else 'bad' for r in res))
    for c,r in zip(cases,res):
        if r not in("ok","unfit"): print(c,r)
