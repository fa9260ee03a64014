"""Step time of any layout in closed form, broken down in named terms; all layouts at once. No torch."""
import dataclasses
import numpy as np
from kit.estimate.hardware import Coefficients, Hardware
from kit.estimate.layouts import Layouts, Array

def gemm(M,N,K,X): 
    h,c=X
    return 2*M*N*K/(h.matmul_flops_per_s*c.gemm_efficiency)*(1+c.gemm_edge/K)*(1+c.gemm_edge/N)*(1+c.gemm_edge/M)+2*(M*K+K*N+M*N)/(h.memory_bytes_per_s*c.memory_efficiency)

def step_time(x,hw,c,full=False):
    h,L,s=x.hidden_size,x.num_layers,x.sequence_length
    t,p,v,cp,r=x.tensor_parallel,x.pipeline_parallel,x.virtual_stages,x.context_parallel,x.data_parallel
    b,B=x.micro_batch_size,x.global_batch_size
    f,V=x.ffn_hidden_size,x.vocab_size; g=np.asarray(x.gated,float)
    a=x.num_heads; d=h/a; hk=d*x.num_kv_heads
    T=b*s/cp; m=x.num_microbatches
    lps=np.ceil(L/(p*v))*v
    W=hw.memory_bytes_per_s*c.memory_efficiency; P=hw.peak_flops_per_s
    X=(hw,c)
    G=lambda M,N,K: gemm(M,N,K,X)
    gm=G(T,(h+2*hk)/t,h)+G(T,h,h/t)+G(T,f*(1+g)/t,h)+G(T,h,f/t)
    S2=T*a/t*s
    fl=x.flash_attention>0
    att=np.where(fl,2*S2*d/(P*c.flash_efficiency)+8*T*h/t/W,4*S2*d/(P*c.attention_efficiency)+13*S2/W)
    sp=np.asarray(x.sequence_parallel)
    seq=np.where(sp,t,1.)
    ew=(22*T*h/seq+4*T*f*(1+.5*g)/t+8*T*h/t)/W*np.where(x.fused_norm,1.,c.unfused_traffic)
    fg=gm+att+ew; bg=2*gm+att*np.where(fl,2.5,2.)+1.6*ew
    # TP comm
    tc=t*cp
    bw=np.where(t<=hw.near_devices,hw.near_bytes_per_s,hw.node_bytes_per_s)*c.node_efficiency
    net=hw.network_bytes_per_s*c.network_efficiency
    inside=t<=hw.node_devices
    bwt=np.where(inside,bw,np.minimum(bw,net)); alt=np.where(inside,c.node_latency_s,c.network_latency_s)
    ar=np.where(t>1,2*(t-1)/t*2*T*h/bwt+alt*2*np.log2(np.maximum(t,2)),0.)
    tpf=2*ar; tpb=2*ar*np.where(sp,1.25,1.)
    kf=(30-6*fl)*c.launch_s+np.where(t>1,2*c.collective_launch_s,0.)
    F=np.maximum(fg+tpf,kf); Bk=np.maximum(bg+tpb,c.backward_launches*kf)
    full_=x.recompute==2; sel=x.recompute==1
    rec=np.where(full_,F,np.where(sel&~fl,att,0.))
    lay=F+Bk+rec
    hd=G(T,V/t,h); ce=T*V/t*14/W
    head=3*hd+1.5*ce
    emb=2*(T*h*6/W+ar*.5)
    # pipeline
    pin=t*cp*r*p<=hw.node_devices
    sv=2*T*h/t
    bwp=np.where(pin,bw,net/hw.node_devices)
    p2p=np.where(p>1,sv/bwp+np.where(pin,c.node_latency_s,c.network_latency_s)+np.where(sp|(t==1),0.,(t-1)/t*2*T*h/bw),0.)
    mid=lps*lay+c.pipeline_exposed*2*v*p2p+c.microbatch_s
    tl=mid+head; tf=mid+emb
    tmax=np.where(p>1,np.maximum(tl,tf),mid+head+emb); tsum=np.where(p>1,(p-2)*mid+tl+tf,tmax)
    steady=m*tmax; bub=(tsum-tmax)/v
    # dp
    npl=(h*(h+2*hk)+h*h+f*h*(2+g))/t; nst=lps*npl+V*h/t
    ranks=r*cp
    tn=np.minimum(t,hw.node_devices)
    cross=ranks*tn>hw.node_devices
    bwd=np.where(cross,np.minimum(bw,net/tn),bw)
    gb=x.gradient_bytes
    dp=np.where(ranks>1,2*(ranks-1)/ranks*nst*gb/bwd+np.where(cross,c.network_latency_s,c.node_latency_s)*2*np.log2(np.maximum(ranks,2)),0.)
    dp=dp*c.data_exposed
    dp=dp+np.where((p>1)&x.tied_embeddings,V*h/t*gb/(net/hw.node_devices),0.)
    z3=np.where((x.zero_stage>=3)&(ranks>1),2*(ranks-1)/ranks*nst*2/bwd*m,0.)
    opt=(np.where(x.zero_stage>=1,nst/ranks,nst)*44+nst*6)/W
    tot=(steady+bub+dp+z3+opt+c.step_s)*c.factor
    if full: return dict(tot=tot,steady=steady,bub=bub,dp=dp,opt=opt,gm=gm,att=att,ew=ew,kf=kf,F=F,tpf=tpf,fg=fg,lps=lps,m=m,head=head)
    return tot
