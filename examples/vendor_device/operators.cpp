// What a device computes: torch's operators on its tensors.
//
// A device must be able to make tensors, to copy them and to read them. For the rest a vendor writes kernels; lab sends
// each operator to the host's kernel and brings the results back.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

namespace lab {

// ---- make, copy, read -----------------------------------------------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory(), kLabKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory(), kLabKeys, c10::dtype_or_default(dtype));
}

// The same bytes under the host's name, for this file alone: possible only because lab's memory is the host's.
at::Tensor as_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) {
    return tensor;
  }
  auto host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

// All copies with lab on one side: from the host, to the host, from one device to the other, on one device.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.is_cpu()) {
    count(non_blocking ? kToDeviceAsync : kToDevice);
  } else if (to.is_cpu()) {
    count(non_blocking ? kToHostAsync : kToHost);
  } else if (from.device() != to.device()) {
    count(kBetween);
  }
  as_host(to).copy_(as_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  return copy_from(from, to.resize_(from.sizes()), /*non_blocking=*/false);
}

at::Scalar read_scalar(const at::Tensor& tensor) { // item(), bool(tensor), float(tensor)
  count(kScalarReads);
  return as_host(tensor).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {elements}, {});
}

// ---- compute --------------------------------------------------------------------------------------------------------

// Of devices torch wants dropout in one kernel, which is not told the generator: so it has to be ours.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const double keep = train.value_or(true) ? 1 - p : 1;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep);
  return {input * mask * (keep > 0 ? 1 / keep : 0), mask};
}

// Convolution too is left to the device, forward and backward.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  const InKernel kernel;
  const auto host_bias = as_host(bias.value_or(at::Tensor()));
  return at::convolution(as_host(input), as_host(weight), host_bias, stride, padding, dilation, transposed,
      output_padding, groups).to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient,
    const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  const InKernel kernel;
  auto [a, b, c] = at::convolution_backward(as_host(gradient), as_host(input), as_host(weight), {{gradient.size(1)}},
      stride, padding, dilation, transposed, output_padding, groups, wanted);
  const auto back = [&](const at::Tensor& host) { return host.defined() ? host.to(input.device()) : host; };
  return {back(a), back(b), back(c)};
}

// Every operator without a kernel above: its tensors go to the host, the host's kernel runs, the results come back.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    count(kShapeReads); // the host must know values to go on: equal(), nonzero(), x[mask]
  }
  const InKernel kernel;
  const auto& arguments = op.schema().arguments();
  DeviceIndex device = -1;
  for (const auto& value : torch::jit::last(*stack, arguments.size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kLab) {
      device = value.toTensor().device().index();
    }
  }
  for (const auto i : c10::irange(arguments.size())) {
    if (arguments[i].name() == "generator") { // else the host would draw from its own
      auto& value = torch::jit::peek(*stack, i, arguments.size());
      const auto generator = value.isNone() ? default_generator(device) : value.toGenerator();
      value = at::check_generator<LabGenerator>(generator)->host;
    }
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// The host's kernels for two losses give the result the shape of the inputs for a while. They warn unless it is empty.
void loss_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  stack->back().toTensor().resize_({0});
  run_on_host(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("resize_", resize);
  m.impl("native_dropout", dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("mse_loss.out", torch::CppFunction::makeFromBoxedFunction<&loss_on_host>());
  m.impl("smooth_l1_loss.out", torch::CppFunction::makeFromBoxedFunction<&loss_on_host>());
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {}); // memory is never reused too early: see recordStream
  m.impl("set_.source_Storage", set_storage);
  // These change what a tensor says about its memory and not the memory: torch's own do for any device.
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view", at::native::view);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Newer versions of torch have this fallback of their own; torch 2.9 runs no operators of its collectives without it.
static torch::Library* autograd = [] {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) {
    return static_cast<torch::Library*>(nullptr);
  }
  static torch::Library made = MAKE_TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1);
  made.fallback(torch::CppFunction::makeFallthrough());
  return &made;
}();

// copy_from() knows both bits. Without these lines torch would resolve them by a copy, and that one by another.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// ---- autocast: what is computed in 16 bits and what in 32, by the lists that CUDA uses ------------------------------

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define LAB_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LAB_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define LAB_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define LAB_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at; // the lists are written for readers inside it
  AT_FORALL_LOWER_PRECISION_FP(LAB_LOWER)
  AT_FORALL_FP32(LAB_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(LAB_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(LAB_PROMOTE)
}

// ---- what lab.py calls: torch.ops.lab.* -----------------------------------------------------------------------------

// Returns when autograd's thread for each device has let go of every earlier backward pass; lab.py says why.
void finish_backward() {
  const at::AutoGradMode grad(true);
  for (const auto device : c10::irange(kDevices)) {
    at::zeros({1}, at::device(c10::Device(kLab, device))).set_requires_grad(true).sum().backward();
  }
}

TORCH_LIBRARY(lab, m) {
  m.def("device_count", [] { return int64_t{kDevices}; });
  m.def("capacity", [] { return kCapacity; });
  m.def("default_generator", [](int64_t device) { return default_generator(checked(device)); });
  m.def("counters", [] { return std::vector<int64_t>(std::begin(counters), std::end(counters)); });
  m.def("reset_counters", [] { std::fill(std::begin(counters), std::end(counters), 0); });
  m.def("finish_backward", finish_backward);
}

} // namespace lab
