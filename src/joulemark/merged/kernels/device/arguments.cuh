// What every kernel gets; mirrored by kernel.Arguments. Spatial triples are (depth, height, width); 2-D has depth 1.
#pragma once
struct Arguments {
    const void* input;      // [batch, *size, channels]
    const void* residual;   // [batch, *out, channels] that the last layer adds, or null
    void* output;           // [batch, *out, channels]
    const void* weights;    // packed by the kernel's own `pack`
    void* scratch;          // of the kernel's own `scratch` bytes, zero before the first launch; or null
    int batch;
    int size[3];            // of the input
    int out[3];             // of the output
    int bricks[3];          // per dimension of the output
    int count;              // bricks in all: batch × bricks
    int blocks;             // of the launch
};
