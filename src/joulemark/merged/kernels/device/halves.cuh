// Arithmetic in two numbers of fp16 at once.
#pragma once
#ifdef EMULATED
DEVICE u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    return fp16::pack(fmaf(fp16::low(a), fp16::low(b), fp16::low(c)), fmaf(fp16::high(a), fp16::high(b), fp16::high(c)));
}
DEVICE u32 positive_halves(u32 v) { return fp16::pack_relu(fp16::low(v), fp16::high(v)); }
#else
DEVICE u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
DEVICE u32 positive_halves(u32 v) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(v) : "r"(0));
    return v;
}
#endif
DEVICE u32 relu6_halves(u32 v) { return fp16::minimum(positive_halves(v), fp16::SIX); }
