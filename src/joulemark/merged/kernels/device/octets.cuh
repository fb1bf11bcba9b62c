// What kernels share whose tensors lie in shared memory by octets of channels: [octet][pixel][8 channels].
//
// A pixel of an octet takes 16 bytes, so eight neighbouring pixels are 128 contiguous bytes: a matrix load at any shift
// meets no bank conflict, and every address is a register plus a constant.
//
// `Element` is the type of the tensors; what a matrix product leaves in a lane are two neighbouring channels of pixel
// lane / 4 and the same two of pixel lane / 4 + 8.
#pragma once
#define UNROLL_2 _Pragma("unroll 2")
enum Activation { NONE, RELU, RELU6, SILU };

DEVICE float silu(float v) { return 0.5f * v * (1.f + tanh_fast(0.5f * v)); }

// Two channels of a pixel, stored; zeros where the pixel is outside of the tensor.
template <Activation A, class E = Element> DEVICE u32 activate(float low, float high, bool outside) {
    if (A == RELU6) return E::minimum(E::pack_relu(low, high), outside ? 0 : E::SIX);
    const u32 both = A == RELU   ? E::pack_relu(low, high)
                     : A == SILU ? E::pack(silu(low), silu(high))
                                 : E::pack(low, high);
    return outside ? 0 : both;
}

// Parts of the packed weights, by their offset in bytes.
DEVICE const uint4* weights_at(const Arguments& a, int offset) { return (const uint4*)((const char*)a.weights + offset); }
DEVICE void load_bias(const Arguments& a, int offset, int channel, float (&bias)[2]) {
    const float* from = (const float*)((const char*)a.weights + offset) + channel;
    bias[0] = load_float(from);
    bias[1] = load_float(from + 1);
}

// Biases that are packed as a product's sum begins, four for each pair of channels: of both pixels of a lane.
DEVICE void load_sum(const Arguments& a, int offset, int channel, float (&bias)[4]) {
    const uint4 v = load_global_4(weights_at(a, offset) + channel / 2);
    bias[0] = float_of(v.x);
    bias[1] = float_of(v.y);
    bias[2] = float_of(v.z);
    bias[3] = float_of(v.w);
}

// The first product of a sum begins with the bias.
DEVICE void multiply(bool first, float (&sum)[4], const u32 (&pixels)[4], u32 w0, u32 w1, const float (&bias)[4]) {
    if (first) Element::mma_from(sum, pixels, w0, w1, bias);
    else Element::mma(sum, pixels, w0, w1);
}

// The octets of a row of pixels as they lie in memory, every 32nd for a lane: a walk without divisions.
template <int OCTETS> struct Walk {
    int octet, pixel;
    DEVICE explicit Walk(int lane) : octet(lane % OCTETS), pixel(lane / OCTETS) {}
    DEVICE void next() {
        octet += 32 % OCTETS;
        pixel += 32 / OCTETS;
        if (32 % OCTETS && octet >= OCTETS) octet -= OCTETS, pixel++;
    }
};
