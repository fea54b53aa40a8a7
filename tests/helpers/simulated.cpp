// A device that computes on the CPU and is none to PyTorch: tensors of it and of the CPU do not mix, as on a GPU.
//
// Every operator is computed by the CPU's own, on copies. An operator that gets tensors of both devices fails, and so
// does, where that is forbidden, whatever would make the host wait for a GPU: numbers and tensors brought to the host,
// tensors brought to the device from ordinary memory, and operators whose result has a size that only the device knows.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <set>
#include <string>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
bool waiting_is_forbidden = false;
// Above 0 within an operator, whose copies to the CPU and back are the simulation's own.
thread_local int depth = 0;

struct WithinOperator {
  WithinOperator() { ++depth; }
  ~WithinOperator() { --depth; }
};

void waits(const std::string& what) {
  TORCH_CHECK(!waiting_is_forbidden || depth > 0, "the host waits for the device: ", what);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, c10::Device(DEVICE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

c10::Stream default_of(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return {DEVICE, 0}; }
  c10::Device getDevice() const override { return {DEVICE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return default_of(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_of(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return default_of(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks hooks;
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& x) {
  if (x.device().is_cpu()) return x;
  void* data = x.numel() ? x.mutable_data_ptr() : nullptr;
  auto same = at::from_blob(data, x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
  return x.is_conj() ? same.conj() : same;
}

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.device() != to.device() && from.numel() > 0)
    waits(from.device().is_cpu() ? "a tensor of the host is copied to it" : "a tensor of it is copied to the host");
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& x) {
  waits("a number of it is brought to the host");
  return at::_local_scalar_dense(on_cpu(x));
}

at::Tensor grouped_mm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& offsets,
                      const std::optional<at::Tensor>& bias, std::optional<at::ScalarType> dtype) {
  WithinOperator within;
  std::optional<at::Tensor> at_cpu;
  if (offsets) at_cpu = on_cpu(*offsets);
  return at::_grouped_mm(on_cpu(a), on_cpu(b), at_cpu, bias, dtype).to(a.device());
}

const std::set<std::string> OF_UNKNOWN_SIZE = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::equal"};

void every_other(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(stack, schema.arguments().size());
  bool of_device = false, of_host = false, by_mask = false;
  auto look = [&](const at::Tensor& x) {
    if (!x.defined()) return;
    of_device |= x.device().type() == DEVICE;
    of_host |= x.device().is_cpu() && x.dim() > 0;
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look(argument.toTensor());
    if (!argument.isList()) continue;
    for (const c10::IValue& entry : argument.toListRef()) {
      if (!entry.isTensor()) continue;
      look(entry.toTensor());
      by_mask |= entry.toTensor().defined() && entry.toTensor().scalar_type() == at::kBool;
    }
  }
  TORCH_CHECK(!(of_device && of_host), schema.name(), " gets tensors of the device and of the CPU");
  const bool of_some = schema.name() == "aten::repeat_interleave" && arguments[1].isNone();
  if (OF_UNKNOWN_SIZE.count(schema.name()) || of_some || (schema.name() == "aten::index" && by_mask))
    waits("the size of what " + schema.name() + " returns");
  WithinOperator within;
  at::native::cpu_fallback(op, stack, false);
}

}  // namespace

TORCH_LIBRARY(simulated_device, m) {
  m.def("forbid_waiting(bool forbid) -> ()", [](bool forbid) { waiting_is_forbidden = forbid; });
}

// A copy computes conjugates itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&every_other>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", [](const at::Tensor& x, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(x, size, stride, offset);
  });
  m.impl("view", [](const at::Tensor& x, at::IntArrayRef size) { return at::native::view(x, size); });
  m.impl("view_as_complex", [](const at::Tensor& x) { return at::native::view_as_complex(x); });
  m.impl("view_as_real", [](const at::Tensor& x) { return at::native::view_as_real(x); });
  m.impl("_reshape_alias", [](const at::Tensor& x, at::IntArrayRef size, at::IntArrayRef) {
    return at::native::view(x, size);
  });
  m.impl("resize_", [](const at::Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat> format)
                        -> const at::Tensor& { return at::native::resize_(x, size, format); });
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& x, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride)
             -> at::Tensor& { return at::native::set_storage_cpu_(x, storage, offset, size, stride); });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("_grouped_mm", grouped_mm);
}
