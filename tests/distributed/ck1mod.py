import os, torch, tempfile, random
import zeropp
from torch import nn
from tests.distributed.harness import run_ranks
import zeropp.checkpoint as ck

class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb=nn.Embedding(50,24); s.blocks=nn.ModuleList([nn.Sequential(nn.Linear(24,36),nn.GELU(),nn.Linear(36,24)) for _ in range(3)])
        s.norm=nn.LayerNorm(24); s.register_buffer("seen",torch.zeros(())); s.head=nn.Linear(24,50,bias=False); s.head.weight=s.emb.weight; s.scale=nn.Parameter(torch.tensor(1.0)); s.e=nn.Parameter(torch.empty(0,3))
    def forward(s,x):
        s.seen.add_(1); h=s.emb(x)
        for b in s.blocks: h=h+b(h)
        return s.head(s.norm(h.flatten(0,1)))*s.scale
def build(cfg):
    torch.manual_seed(0); m=Net(); o=torch.optim.AdamW(m.parameters(),lr=1e-2)
    return m, zeropp.ZeroOptimizer(o,m,cfg)
def train(m,o,n,rank,start=0):
    out=[]
    for i in range(start,start+n):
        g=torch.Generator().manual_seed(100*i+rank)
        x=torch.randint(0,50,(4,6),generator=g)
        l=nn.functional.cross_entropy(m(x),x.flatten()); o.backward(l); o.step(); o.zero_grad(); out.append(l.item())
    return out
def go(path,cfg,asyn):
    import torch.distributed as dist
    r=dist.get_rank()
    m,o=build(cfg); s=torch.optim.lr_scheduler.CosineAnnealingLR(o.inner,100)
    train(m,o,3,r)
    ck.save(path,m,o,{"sched":s,"epoch":3,"mine":torch.arange(r+2)},asynchronous=asyn)
    full=zeropp.full_state(m); rs=(random.random(),torch.rand(1).item())
    a=train(m,o,3,r,3)
    ck.wait()
    return full,a,rs
def back(path,cfg):
    import torch.distributed as dist
    r=dist.get_rank()
    m,o=build(cfg); train(m,o,1,r,9); s=torch.optim.lr_scheduler.CosineAnnealingLR(o.inner,100)
    got=ck.load(path,m,o,{"sched":s})
    full=zeropp.full_state(m); rs=(random.random(),torch.rand(1).item())
    return full,train(m,o,3,r,3),rs,got
