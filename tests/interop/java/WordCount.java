import java.time.Duration;
import java.util.*;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.*;
import org.apache.kafka.streams.kstream.*;

/** Counts words with Kafka Streams, exactly once, until standard input ends. */
public class WordCount {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("application.id", "words");
        settings.put("state.dir", args[1]);
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("default.key.serde", Serdes.String().getClass());
        settings.put("default.value.serde", Serdes.String().getClass());
        settings.put("commit.interval.ms", 100);
        settings.put("num.stream.threads", 2);
        settings.put("consumer.auto.offset.reset", "earliest");
        settings.put("consumer.heartbeat.interval.ms", 200);
        settings.put("consumer.session.timeout.ms", 10000);
        StreamsBuilder builder = new StreamsBuilder();
        builder.<String, String>stream("lines")
            .flatMapValues(line -> Arrays.asList(line.split(" ")))
            .groupBy((key, word) -> word)
            .count(Materialized.as("counts"))
            .toStream()
            .to("counts", Produced.with(Serdes.String(), Serdes.Long()));
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.start();
        while (System.in.read() >= 0)
            ;
        System.out.println(streams.close(Duration.ofSeconds(20)) + " " + streams.state());
    }
}
