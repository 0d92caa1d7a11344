// Argument checks of the raw ops. An error's text begins with the name of a class of replaystate.errors, so that the Python
// side can raise that class: "ShapeError: replay_step: u_ring: expected ...".
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace replaystate {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] void fail(const char* error, const char* fn, const Parts&... parts) {
  std::ostringstream text;
  text << error << ": " << fn << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline std::string shape_text(const Tensor& x) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < x.dim(); ++i) text << (i ? ", " : "") << x.size(i);
  text << ']';
  return text.str();
}

// Shape with -1 for a free size.
inline void check_shape(const char* fn, const char* name, const Tensor& x, std::initializer_list<int64_t> shape) {
  bool fits = x.dim() == int64_t(shape.size());
  int64_t i = 0;
  for (auto it = shape.begin(); fits && it != shape.end(); ++it, ++i) fits = *it < 0 || *it == x.size(i);
  if (fits) return;
  std::ostringstream expected;
  for (auto it = shape.begin(); it != shape.end(); ++it) {
    expected << (it == shape.begin() ? "" : ", ");
    if (*it < 0) expected << "any"; else expected << *it;
  }
  fail("ShapeError", fn, name, ": expected shape [", expected.str(), "], got ", shape_text(x));
}

inline void check_cpu(const char* fn, const char* name, const Tensor& x) {
  int32_t layout = -1;
  if (x.defined()) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(x.get(), &layout));
  if (layout != aoti_torch_layout_strided() || !x.is_cpu()) fail("ShapeError", fn, name, ": expected a dense tensor on the CPU");
}

inline DType float_dtype(const char* fn, const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    default: fail("DTypeError", fn, name, ": expected float32, bfloat16 or float16");
  }
}

inline void check_dtype(const char* fn, const char* name, const Tensor& x, ScalarType dtype, const char* text) {
  if (x.scalar_type() != dtype) fail("DTypeError", fn, name, ": expected ", text);
}

// Strides are never negative in torch; this is what makes every address of a non-empty tensor lie in its storage.
inline char* data(const Tensor& x) { return static_cast<char*>(x.data_ptr()); }

// [num] or [rows, columns] of integers with any stride, int32 or int64.
class Ints {
 public:
  Ints(const char* fn, const char* name, const Tensor& x) {
    check_cpu(fn, name, x);
    const auto type = x.scalar_type();
    if (type != ScalarType::Int && type != ScalarType::Long) fail("DTypeError", fn, name, ": expected int32 or int64");
    if (x.dim() != 1) fail("ShapeError", fn, name, ": expected 1 dim, got shape ", shape_text(x));
    data_ = data(x);
    stride_ = x.stride(0), size_ = x.size(0);
    wide_ = type == ScalarType::Long;
  }
  int64_t size() const { return size_; }
  int64_t operator[](int64_t i) const {
    return wide_ ? reinterpret_cast<const int64_t*>(data_)[i * stride_] : reinterpret_cast<const int32_t*>(data_)[i * stride_];
  }

 private:
  char* data_;
  int64_t stride_, size_;
  bool wide_;
};

// One int32 word a slot, any stride, written in place.
class Words {
 public:
  Words(const char* fn, const char* name, const Tensor& x, int64_t pool) {
    check_cpu(fn, name, x);
    check_dtype(fn, name, x, ScalarType::Int, "int32");
    check_shape(fn, name, x, {pool});
    data_ = reinterpret_cast<int32_t*>(data(x));
    stride_ = x.stride(0);
    if (pool > 1 && stride_ < 1) fail("ShapeError", fn, name, ": expected words that do not overlap");
  }
  int32_t& operator[](int64_t i) const { return data_[i * stride_]; }

 private:
  int32_t* data_;
  int64_t stride_;
};

// [pool, layers] step records.
class Records {
 public:
  Records(const char* fn, const Tensor& x, int64_t pool) {
    check_cpu(fn, "step_records", x);
    check_dtype(fn, "step_records", x, ScalarType::Int, "int32");
    check_shape(fn, "step_records", x, {pool, -1});
    data_ = reinterpret_cast<int32_t*>(data(x));
    slot_ = x.stride(0), layer_ = x.stride(1), layers_ = x.size(1);
    if ((pool > 1 && slot_ < 1) || (layers_ > 1 && layer_ < 1)) {
      fail("ShapeError", fn, "step_records: expected words that do not overlap");
    }
  }
  int64_t layers() const { return layers_; }
  int32_t& at(int64_t slot, int64_t layer) const { return data_[slot * slot_ + layer * layer_]; }

 private:
  int32_t* data_;
  int64_t slot_, layer_, layers_;
};

// Elements inside dims first..last are dense (sizes of 1 may have any stride).
inline bool dense_from(const Tensor& x, int64_t first) {
  int64_t expected = 1;
  for (int64_t i = x.dim() - 1; i >= first; --i) {
    if (x.size(i) != 1 && x.stride(i) != expected) return false;
    expected *= x.size(i);
  }
  return true;
}

inline Pool pool_of(const char* fn, const char* name, const Tensor& x) {
  int64_t slot = 1;
  for (int64_t i = 1; i < x.dim(); ++i) slot *= x.size(i);
  if (!dense_from(x, 1)) fail("ShapeError", fn, name, ": expected dense slots (only dim 0 strided)");
  if (x.size(0) > 1 && x.stride(0) < slot) fail("ShapeError", fn, name, ": expected slots that do not overlap");
  return {data(x), float_dtype(fn, name, x), x.stride(0), slot / (x.size(1) ? x.size(1) : 1)};
}

inline Parameter parameter_of(const char* fn, const char* name, const Tensor& x, int64_t HV) {
  check_cpu(fn, name, x);
  check_shape(fn, name, x, {HV});
  return {data(x), float_dtype(fn, name, x), x.stride(0)};
}

struct Pools {
  Sizes sizes;
  int64_t slots;
  Pool state, u, k, g;
};

inline Pools check_pools(const char* fn, const Tensor& state, const Tensor& u, const Tensor& k, const Tensor& g) {
  check_cpu(fn, "state", state);
  check_cpu(fn, "u_ring", u);
  check_cpu(fn, "k_ring", k);
  check_cpu(fn, "g_ring", g);
  check_shape(fn, "state", state, {-1, -1, -1, -1});
  const int64_t slots = state.size(0), HV = state.size(1), V = state.size(2), K = state.size(3);
  check_shape(fn, "k_ring", k, {slots, -1, -1, K});
  const int64_t H = k.size(1), R = k.size(2);
  if (H < 1 || HV < 1 || K < 1 || V < 1 || HV % H) {
    fail("ShapeError", fn, "state, k_ring: expected heads and dims of at least 1 and H that divides HV, got H=", H, ", HV=", HV,
         ", K=", K, ", V=", V);
  }
  check_shape(fn, "u_ring", u, {slots, HV, R, V});
  check_shape(fn, "g_ring", g, {slots, HV, R});
  check_dtype(fn, "g_ring", g, ScalarType::Float, "float32");
  if (R < 1) fail("ShapeError", fn, "k_ring: expected at least 1 ring slot");
  return {{H, HV, K, V, R}, slots, pool_of(fn, "state", state), pool_of(fn, "u_ring", u), pool_of(fn, "k_ring", k), pool_of(fn, "g_ring", g)};
}

// Rows and windows that the ring can hold: 1 <= T <= W and W + T <= R.
inline void check_window(const char* fn, int64_t window, int64_t width, int64_t ring_slots) {
  if (width < 1 || width > window || window > ring_slots - width) {
    fail("ArgumentError", fn, "expected 1 <= T <= W and W + T <= R, got T=", width, ", W=", window, ", R=", ring_slots);
  }
}

}  // namespace replaystate
