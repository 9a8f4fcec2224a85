// What device.cpp and operators.cpp share. "lab" fills the place that torch keeps for one kind of device from outside,
// PrivateUse1; lab.py gives it its name and its Python side.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <atomic>
#include <utility>

namespace lab {

using c10::DeviceIndex;
constexpr auto kLab = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr int64_t kCapacity = int64_t{4} << 30; // bytes of each device
const c10::DispatchKeySet kLabKeys(c10::DispatchKey::PrivateUse1);

// The index itself, if there is such a device.
DeviceIndex checked(int64_t index);

// Where all tensors of lab live: on the calling thread's current device.
c10::Allocator& memory();

// A random generator that belongs to a device. One of the host's draws for it.
struct LabGenerator final : c10::GeneratorImpl {
  explicit LabGenerator(DeviceIndex device);
  LabGenerator(DeviceIndex device, at::Generator draws);
  static c10::DeviceType device_type() { return kLab; }
  void set_current_seed(uint64_t seed) override { impl.set_current_seed(seed); }
  uint64_t current_seed() const override { return impl.current_seed(); }
  uint64_t seed() override { return impl.seed(); }
  void set_offset(uint64_t offset) override { impl.set_offset(offset); }
  uint64_t get_offset() const override { return impl.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { impl.set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl.get_state(); }
  LabGenerator* clone_impl() const override { return new LabGenerator(device().index(), host.clone()); }

  at::Generator host;
  c10::GeneratorImpl& impl; // of host
};

// The one that draws where no generator is given; a negative index means the current device.
const at::Generator& default_generator(DeviceIndex device);

// What a program moved, and where it waited for the device. lab.py knows the counters by their order.
enum Counter {
  kScalarReads,
  kShapeReads,
  kToHost,
  kToHostAsync,
  kToDevice,
  kToDeviceAsync,
  kBetween,
  kSyncs,
  kCounted
};
extern std::array<std::atomic<int64_t>, kCounted> counters;
void count(Counter what);

// While one lives, an operator is at work: what that copies and reads is no doing of the program's, and not counted.
class InKernel {
 public:
  InKernel();
  ~InKernel();

 private:
  bool outer_;
};

} // namespace lab
