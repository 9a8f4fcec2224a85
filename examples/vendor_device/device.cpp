// What a device is to torch: memory, random numbers, a guard that knows the current device, streams and events, and
// answers to the questions that torch asks of any accelerator.
//
// lab's memory is a part of the host's, and the host computes for it. So this file holds what every device must bring
// along and nothing else; comments say where a vendor's own runtime would be called.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <chrono>
#include <mutex>
#include <unordered_set>

namespace lab {

thread_local DeviceIndex current_device = 0; // each thread has its own, as with CUDA

DeviceIndex checked(int64_t index) {
  TORCH_CHECK(0 <= index && index < kDevices, "There is no device lab:", index, ". Write lab:0 or lab:1.");
  return static_cast<DeviceIndex>(index);
}

DeviceIndex or_current(DeviceIndex index) {
  return index < 0 ? current_device : checked(index);
}

// ---- counters -------------------------------------------------------------------------------------------------------

std::array<std::atomic<int64_t>, kCounted> counters{};
thread_local bool in_kernel = false;

void count(Counter what) {
  counters[what] += in_kernel ? 0 : 1;
}
InKernel::InKernel() : outer_(std::exchange(in_kernel, true)) {}
InKernel::~InKernel() {
  in_kernel = outer_;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

// As a DeviceAllocator, it answers torch.accelerator.memory_allocated() and its relatives too.
class Memory final : public c10::DeviceAllocator {
 public:
  // Made once and never destroyed, like everything here that torch may still call when the process ends.
  static Memory& instance() {
    static auto& memory = *new Memory;
    return memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto free = kCapacity - stats_[device].allocated_bytes[0].current;
      TORCH_CHECK_WITH(OutOfMemoryError, static_cast<int64_t>(bytes) <= free, "lab:", int{device},
          " is out of memory: ", bytes, " bytes were asked for, and ", free, " are free. Use smaller batches.");
      for_each(device, [&](Stat& stat) { stat.increase(bytes); });
    }
    auto* block = new Block{c10::alloc_cpu(bytes), bytes, device}; // a vendor's runtime allocates here
    return {block->data, block, &Memory::release, {kLab, device}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {} // there is no cache
  void recordStream(const c10::DataPtr&, c10::Stream) override {} // no stream is ever behind
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_[checked(device)];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each(checked(device), [](Stat& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each(checked(device), [](Stat& stat) { stat.reset_peak(); });
  }
  // Free and total bytes. No "override": torch 2.9 does not ask for it yet.
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) {
    return {kCapacity - getDeviceStats(device).allocated_bytes[0].current, kCapacity};
  }

 private:
  using Stat = c10::CachingAllocator::Stat;
  struct Block {
    void* data;
    size_t bytes;
    DeviceIndex device;
  };
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    const std::lock_guard<std::mutex> lock(instance().mutex_);
    instance().for_each(block->device, [&](Stat& stat) { stat.decrease(block->bytes); });
    c10::free_cpu(block->data);
  }
  template <typename Change>
  void for_each(DeviceIndex device, Change change) {
    auto& stats = stats_[device];
    change(stats.allocated_bytes[0]); // [0] is the sum over all pools; without a cache, the three are the same
    change(stats.active_bytes[0]);
    change(stats.reserved_bytes[0]);
  }
  std::mutex mutex_;
  c10::CachingDeviceAllocator::DeviceStats stats_[kDevices];
};
REGISTER_ALLOCATOR(kLab, &Memory::instance())

c10::Allocator& memory() {
  return Memory::instance();
}

// Host memory that a device reads by itself while the host goes on. This one is only known to be such.
class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& instance() {
    static auto& memory = *new PinnedMemory;
    return memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.insert(data);
    return {data, data, &PinnedMemory::release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool contains(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.count(data) > 0;
  }

 private:
  static void release(void* data) {
    const std::lock_guard<std::mutex> lock(instance().mutex_);
    instance().blocks_.erase(data);
    c10::free_cpu(data);
  }
  std::mutex mutex_;
  std::unordered_set<const void*> blocks_;
};

// ---- random numbers -------------------------------------------------------------------------------------------------

LabGenerator::LabGenerator(DeviceIndex device) : LabGenerator(device, at::detail::createCPUGenerator()) {}
LabGenerator::LabGenerator(DeviceIndex device, at::Generator draws)
    : GeneratorImpl({kLab, device}, kLabKeys), host(std::move(draws)), impl(*host.unsafeGetGeneratorImpl()) {}

const at::Generator& default_generator(DeviceIndex device) {
  static const auto& generators = *new std::array<at::Generator, kDevices>{
      at::make_generator<LabGenerator>(DeviceIndex{0}), at::make_generator<LabGenerator>(DeviceIndex{1})};
  return generators[or_current(device)];
}

// ---- guard: the current device, streams and events ------------------------------------------------------------------

// The host computes at once. So a stream has always finished, and an event is the moment when it was recorded. Streams
// are told apart all the same: programs make one current and expect to find the other again.
using Clock = std::chrono::steady_clock;
thread_local c10::StreamId current_stream[kDevices] = {};
std::atomic<c10::StreamId> last_stream{0};

c10::Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {kLab, device}, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLab; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kLab, current_device}; }
  void setDevice(c10::Device device) const override { current_device = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kLab, std::exchange(current_device, checked(device.index()))};
  }
  void synchronizeDevice(DeviceIndex) const override { count(kSyncs); } // a vendor's runtime waits here

  c10::Stream getStream(c10::Device device) const override {
    const auto index = or_current(device.index());
    return stream_of(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(or_current(device.index()), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(or_current(device.index()), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device_index(), std::exchange(current_stream[stream.device_index()], stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { count(kSyncs); }

  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {
    *event = *event == nullptr ? new Clock::time_point : *event;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { count(kSyncs); }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override { // in milliseconds
    const auto time = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- hooks: with their answers, torch.accelerator is lab ------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; } // false where there is no driver; must not throw
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = checked(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, checked(device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, or_current(device));
  }
  at::Device getDeviceFromPtr(void*) const override { return {kLab, current_device}; }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::instance().contains(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::instance(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<LabGenerator>(or_current(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = memory().allocate(bytes);
    memory().copy_data(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
[[maybe_unused]] const bool hooks_are_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

} // namespace lab
