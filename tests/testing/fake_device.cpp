// An accelerator made of host memory, under torch's PrivateUse1 key: every byte and every copy is counted.
//
// Operators run on the CPU by torch's boxed fallback. What can't go that way (memory, views, copies) is here.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <atomic>
#include <bit>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;

// The order is known to fake_device.py.
enum Counter {
  kLiveBytes,
  kPeakBytes,
  kAllocations,
  kToDeviceBytes,
  kToDeviceCopies,
  kToHostBytes,
  kToHostCopies,
  kPinnedBytes,
  kPinnedPeakBytes,
  kPinnedReservedBytes,
  kPinnedReservedPeakBytes,
  kHazards,
  kWaits,
  kCounters
};

std::mutex mutex;
int64_t counters[kCounters] = {};
int64_t budget_bytes = -1;  // below zero: none
int64_t fail_at = -1;       // index of the allocation that fails; below zero: none
bool fail_on = false;       // whether every later one fails too
std::unordered_map<const void*, size_t>& sizes() {
  static auto* map = new std::unordered_map<const void*, size_t>();  // tensors may outlive static objects
  return *map;
}
std::unordered_map<const void*, size_t>& pinned_sizes() {
  static auto* map = new std::unordered_map<const void*, size_t>();
  return *map;
}

// Copies that the fallback makes are no transfers: a real device would compute where the data is.
thread_local bool in_fallback = false;

// --------------------------------------------------------------------------------------------- streams

// The default stream works at once. Copies on other streams wait until somebody waits for them: a wait that is
// missing shows as wrong values, on every run.
struct Copy {
  at::Tensor to, from;  // on the CPU; the device's side doesn't own its memory
  const void* device_data;
};

struct Queue {
  std::deque<Copy> copies;
  int64_t enqueued = 0, done = 0;
};

struct Mark {
  c10::StreamId stream;
  int64_t enqueued;
};

std::recursive_mutex queue_mutex;
std::unordered_map<c10::StreamId, Queue>& queues() {
  static auto* map = new std::unordered_map<c10::StreamId, Queue>();
  return *map;
}
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream = 0;

void finish(c10::StreamId stream, int64_t enqueued) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  auto& queue = queues()[stream];
  while (queue.done < enqueued) {
    auto copy = std::move(queue.copies.front());
    queue.copies.pop_front();
    queue.done += 1;
    copy.to.copy_(copy.from);
  }
}

void finish(c10::StreamId stream) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  finish(stream, queues()[stream].enqueued);
}

// Memory that a waiting copy reads or writes is being freed: on a device that would be undefined behaviour.
void finish_copies_of(const void* device_data) {
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  for (auto& [stream, queue] : queues()) {
    for (const auto& copy : queue.copies) {
      if (copy.device_data != device_data) continue;
      {
        std::lock_guard<std::mutex> counting(mutex);
        counters[kHazards] += 1;
      }
      finish(stream);
      break;
    }
  }
}

// ---------------------------------------------------------------------------------------------- memory

void free_on_device(void* data) {
  if (data == nullptr) return;
  finish_copies_of(data);
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = sizes().find(data);
    counters[kLiveBytes] -= static_cast<int64_t>(found->second);
    sizes().erase(found);
  }
  c10::free_cpu(data);
}

// A device allocator, so that `torch.accelerator` can ask it too: nothing is cached, so all there is to tell is bytes.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kFake, 0);
    if (size == 0) return {nullptr, nullptr, &free_on_device, device};
    {
      std::lock_guard<std::mutex> lock(mutex);
      const auto index = counters[kAllocations]++;
      const auto live = counters[kLiveBytes] + static_cast<int64_t>(size);
      const bool fails = fail_at >= 0 && (index == fail_at || (fail_on && index > fail_at));
      TORCH_CHECK_WITH(OutOfMemoryError, !fails, "fake out of memory. Allocation ", index, " (", size,
                       " bytes) was made to fail.");
      TORCH_CHECK_WITH(OutOfMemoryError, budget_bytes < 0 || live <= budget_bytes,
                       "fake out of memory. Tried to allocate ", size, " bytes; ", counters[kLiveBytes],
                       " bytes are in use of a budget of ", budget_bytes, " bytes.");
      counters[kLiveBytes] = live;
      counters[kPeakBytes] = std::max(counters[kPeakBytes], live);
    }
    void* data = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> lock(mutex);
    sizes()[data] = size;
    return {data, data, &free_on_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*bytes)[static_cast<size_t>(c10::CachingDeviceAllocator::StatType::AGGREGATE)];
      all.current = counters[kLiveBytes];
      all.peak = counters[kPeakBytes];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    counters[kPeakBytes] = counters[kLiveBytes];
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

// As CUDA's allocator of pinned memory: sizes are powers of two, and what is freed is kept until it is asked back.
std::map<size_t, std::vector<void*>>& pinned_cache() {
  static auto* map = new std::map<size_t, std::vector<void*>>();
  return *map;
}

void free_pinned(void* data) {
  if (data == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = pinned_sizes().find(data);
  counters[kPinnedBytes] -= static_cast<int64_t>(found->second);
  pinned_cache()[found->second].push_back(data);
  pinned_sizes().erase(found);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t asked) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (asked == 0) return {nullptr, nullptr, &free_pinned, device};
    const size_t size = std::bit_ceil(asked);
    std::lock_guard<std::mutex> lock(mutex);
    auto& kept = pinned_cache()[size];
    void* data = kept.empty() ? c10::alloc_cpu(size) : kept.back();
    if (kept.empty()) {
      counters[kPinnedReservedBytes] += static_cast<int64_t>(size);
    } else {
      kept.pop_back();
    }
    pinned_sizes()[data] = size;
    counters[kPinnedBytes] += static_cast<int64_t>(size);
    counters[kPinnedPeakBytes] = std::max(counters[kPinnedPeakBytes], counters[kPinnedBytes]);
    counters[kPinnedReservedPeakBytes] = std::max(counters[kPinnedReservedPeakBytes], counters[kPinnedReservedBytes]);
    return {data, data, &free_pinned, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // a host that frees too soon shows as a hazard
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [size, kept] : pinned_cache()) {
      counters[kPinnedReservedBytes] -= static_cast<int64_t>(size * kept.size());
      for (void* data : kept) c10::free_cpu(data);
    }
    pinned_cache().clear();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned_sizes().count(data) > 0;
}

DeviceMemory device_memory;
PinnedMemory pinned_memory;

// ------------------------------------------------------------------------- device, generator, hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, 0), id); }
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device) const override { return {kFake, 0}; }
  c10::Device getDevice() const override { return {kFake, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++last_stream); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++last_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    delete static_cast<Mark*>(*event);
    *event = new Mark{stream.id(), queues()[stream.id()].enqueued};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void block(void* event, const c10::Stream&) const override { synchronizeEvent(event); }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    const auto* mark = static_cast<Mark*>(event);
    return mark == nullptr || queues()[mark->stream].done >= mark->enqueued;
  }
  void synchronizeEvent(void* event) const override {
    if (const auto* mark = static_cast<Mark*>(event)) finish(mark->stream, mark->enqueued);
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    return queues()[stream.id()].copies.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override { finish(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    for (auto& [stream, queue] : queues()) finish(stream, queue.enqueued);
  }
};

// A generator of the device: a CPU generator under another name. The fallback hands on the inner one.
struct FakeGenerator final : c10::GeneratorImpl {
  explicit FakeGenerator(at::Generator inner)
      : c10::GeneratorImpl(c10::Device(kFake, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  at::Generator inner;

 private:
  FakeGenerator* clone_impl() const override { return new FakeGenerator(inner.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return {kFake, 0}; }
  // The default generator is the CPU's: one seed gives one result, on the CPU and here.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* generator = new at::Generator(at::make_generator<FakeGenerator>(at::detail::getDefaultCPUGenerator()));
    return *generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<FakeGenerator>(at::detail::createCPUGenerator());
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = device_memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

// --------------------------------------------------------------------------------------------- operators

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor
                         : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                         tensor.options().device(c10::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.is_cpu() != to.is_cpu() && !in_fallback) {
    std::lock_guard<std::mutex> lock(mutex);
    counters[from.is_cpu() ? kToDeviceBytes : kToHostBytes] += static_cast<int64_t>(from.nbytes());
    counters[from.is_cpu() ? kToDeviceCopies : kToHostCopies] += 1;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& host = from.is_cpu() ? from : to;
  const auto& device = from.is_cpu() ? to : from;
  if (non_blocking && !in_fallback && current_stream != 0 && host.is_cpu() && is_pinned(host.storage().data())) {
    std::lock_guard<std::recursive_mutex> lock(queue_mutex);
    auto& queue = queues()[current_stream];
    queue.copies.push_back({on_cpu(to), on_cpu(from), device.storage().data()});
    queue.enqueued += 1;
    return to;
  }
  if (from.is_cpu() != to.is_cpu() && !in_fallback && !(non_blocking && is_pinned(host.storage().data()))) {
    std::lock_guard<std::mutex> lock(mutex);
    counters[kWaits] += 1;
  }
  finish(current_stream);
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

struct InFallback {
  bool before = in_fallback;
  InFallback() { in_fallback = true; }
  ~InFallback() { in_fallback = before; }
};

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (auto& value : *stack) {
    if (value.isGenerator() && value.toGenerator().device().type() == kFake)
      value = c10::IValue(value.toGenerator().get<FakeGenerator>()->inner);
  }
  finish(current_stream);
  InFallback inside;
  at::native::cpu_fallback(op, stack);
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  fall_back(operator_named("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  // The arguments are (grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups,
  // output_mask); the CPU's operator takes the bias's size after the weight.
  const auto first = static_cast<std::ptrdiff_t>(stack->size()) - 10;
  const auto weight = (*stack)[first + 2].toTensor();
  const bool transposed = (*stack)[first + 6].toBool();
  const auto channels = transposed ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
  stack->insert(stack->begin() + first + 3, c10::IValue(std::vector<int64_t>{channels}));
  fall_back(operator_named("aten::convolution_backward"), stack);
}

// Its schema doesn't say that it writes the running statistics, so the fallback would lose them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double epsilon) {
  const auto if_any = [](const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() ? std::optional<at::Tensor>(on_cpu(*tensor)) : std::nullopt;
  };
  InFallback inside;
  const auto [output, batch_mean, batch_inverse] = at::native_batch_norm(
      on_cpu(input), if_any(weight), if_any(bias), if_any(mean), if_any(variance), training, momentum, epsilon);
  return {output.to(input.device()), batch_mean.to(input.device()), batch_inverse.to(input.device())};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &at::native::_local_scalar_dense_cpu);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &at::native::set_cpu_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  // For a device without kernels of its own, torch would decompose the norms, which rounds elsewhere than the CPU
  // does, and take the losses' variants with an output, which warn.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm",
                           "native_group_norm_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fall_back>());
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// The engine starts one thread a device, once, at a process's first backward. A device that comes later has none.
struct OpenEngine : torch::autograd::Engine {
  static void add_device_thread() {
    auto& engine = get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*&OpenEngine::device_ready_queues_).empty()) (engine.*&OpenEngine::start_device_threads)();
  }
};

}  // namespace

extern "C" {

void memkit_fake_register() {
  c10::SetAllocator(kFake, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  at::setHostAllocator(kFake, &pinned_memory);
  static c10::impl::DeviceGuardImplRegistrar registrar(kFake, new Guard());
  OpenEngine::add_device_thread();
}

void memkit_fake_empty_host_cache() { pinned_memory.empty_cache(); }

int64_t memkit_fake_read(int counter) {
  std::lock_guard<std::mutex> lock(mutex);
  return counters[counter];
}

void memkit_fake_set_limits(int64_t budget, int64_t failing_allocation, int all_later_too) {
  std::lock_guard<std::mutex> lock(mutex);
  budget_bytes = budget;
  fail_at = failing_allocation;
  fail_on = all_later_too != 0;
}

void memkit_fake_reset(int peak, int rest) {
  std::lock_guard<std::mutex> lock(mutex);
  if (peak) {
    counters[kPeakBytes] = counters[kLiveBytes];
    counters[kPinnedPeakBytes] = counters[kPinnedBytes];
    counters[kPinnedReservedPeakBytes] = counters[kPinnedReservedBytes];
  }
  if (rest) {
    for (auto counter : {kAllocations, kToDeviceBytes, kToDeviceCopies, kToHostBytes, kToHostCopies, kHazards,
                         kWaits})
      counters[counter] = 0;
  }
}
}
